"""Whole replays: the router's own policy and view against simulated workers."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.bench.load.trace import TraceLine
from services.cli import app
from services.config import PAIR_POLICIES
from services.replay.cluster import Replay
from services.replay.costs import LLAMA_70B, TINY_CPU
from services.replay.outcome import Targets, balance, outcome, percentiles
from services.replay.record import Record, Setting
from services.replay.table import BEGIN, END, Cell, _append, read, table, write
from services.replay.traffic import Arrival, arrivals, halves, varied


def conversations(count: int, turns: int, seed: int = 1) -> list[Arrival]:
    """Each turn has the prompt of the one before, and a few blocks more."""
    rng, lines = random.Random(seed), []
    for talk in range(count):
        at_s, blocks = rng.random() * 60, [0]
        for turn in range(turns):
            blocks = [*blocks, *(1000 * talk + 10 * turn + i + 1 for i in range(3))]
            tokens = 512 * (len(blocks) - 1) + rng.randrange(1, 512)
            lines.append(TraceLine(at_s, tokens, rng.randrange(1, 60), tuple(blocks)))
            at_s += 5 + rng.random() * 10
    return arrivals(sorted(lines, key=lambda line: line.at_s))


SMALL = Setting(prefill=3, decode=2, costs=LLAMA_70B)


def replay(requests: list[Arrival], policy: str = "cost", **changed: object) -> list[Record]:
    return Replay(requests, replace(SMALL, policy=policy, **changed)).run()


@pytest.mark.parametrize("policy", PAIR_POLICIES)
def test_every_request_is_served_in_order_of_its_states_under_every_policy(policy: str) -> None:
    requests = conversations(12, 4)
    simulation = Replay(requests, Setting(policy=policy, prefill=3, decode=2, costs=LLAMA_70B))
    records = simulation.run()
    assert len(records) == len(requests)
    for r in records:
        assert r.arrival.at_s < r.placed_s <= r.first_token_s < r.joined_s <= r.end_s
        assert r.placed_s <= r.granted_s
        assert 0 <= r.cached_tokens + r.loaded_tokens < r.arrival.num_tokens
    computed = sum(w.tokens_computed for w in simulation.prefills.values())
    assert computed == sum(r.arrival.num_tokens - r.cached_tokens - r.loaded_tokens for r in records)
    assert sum(w.tokens_made for w in simulation.decodes.values()) == sum(r.arrival.output_tokens - 1 for r in records)
    for worker in (*simulation.prefills.values(), *simulation.decodes.values()):
        worker.pool.check()
        counts = worker.pool.counts()
        assert counts.used == counts.reserved == 0
    assert len(simulation.view.bookings) == 0
    for name, worker in (simulation.prefills | simulation.decodes).items():
        entry = simulation.view.entry(name)
        assert entry is not None
        assert len(entry.residency) == worker.pool.counts().cached  # every event has come


def test_a_replay_is_the_same_each_time_and_another_seed_is_another() -> None:
    requests = conversations(8, 3)
    first, again = (replay(varied(requests, 3), seed=3) for _ in range(2))
    assert [(r.pair, r.end_s) for r in first] == [(r.pair, r.end_s) for r in again]
    assert [r.arrival.at_s for r in replay(varied(requests, 4))] != [r.arrival.at_s for r in first]


def test_the_default_policy_finds_conversations_again_and_round_robin_does_not() -> None:
    requests = conversations(12, 6)
    hits = {p: outcome(replay(requests, p, pulls=False), SMALL, Targets()).hit_rate for p in ("cost", "round-robin")}
    assert hits["cost"] > hits["round-robin"] + 0.2


def test_kv_is_loaded_from_other_workers_unless_that_is_off() -> None:
    requests = conversations(12, 6)
    assert any(r.loaded_tokens for r in replay(requests, "round-robin"))
    assert not any(r.loaded_tokens for r in replay(requests, "round-robin", pulls=False))


def test_a_prompt_that_no_pair_could_hold_is_not_served_and_the_others_are() -> None:
    huge = Arrival(number=99, at_s=1.0, num_tokens=TINY_CPU.cache_tokens + 1, output_tokens=5, names=())
    records = replay([*conversations(2, 2), huge], costs=TINY_CPU)
    assert [r.arrival.number for r in records if r.end_s < 0] == [99]


# --- traffic and figures ---


def test_equal_ids_after_different_blocks_are_different_blocks() -> None:
    a, b, c = arrivals([TraceLine(0, 1024, 1, (1, 7)), TraceLine(0, 1024, 1, (2, 7)), TraceLine(0, 1100, 1, (1, 7, 9))])
    assert a.names[0] != b.names[0]
    assert a.names[1] != b.names[1]
    assert c.names == a.names  # the third block is not full


def test_halves_and_rates_keep_the_gaps() -> None:
    requests = conversations(4, 4)
    first, second = halves(requests)
    assert [r.number for r in (*first, *second)] == [r.number for r in requests]
    assert second[0].at_s == 0.0
    faster = varied(second, 0, scale_rate=4)
    assert faster[-1].at_s == pytest.approx(second[-1].at_s / 4)
    assert 0.8 < len(varied(requests * 50, 1)) / (50 * len(requests)) < 1.0
    with pytest.raises(ValueError, match="--scale-rate"):
        varied(requests, 0, scale_rate=0)


def test_figures_by_hand() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0]) == {"p50": 2.0, "p90": 4.0, "p99": 4.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert balance(Counter(a=30, b=10), 2) == 1.5
    assert balance(Counter(a=30), 3) == 3.0
    arrival = Arrival(number=0, at_s=10.0, num_tokens=1000, output_tokens=11, names=())
    record = Record(arrival=arrival, first_token_s=12.2, end_s=12.8)
    assert (record.ttft_ms, record.tpot_ms) == (pytest.approx(2200), pytest.approx(60))
    assert Targets(ttft_ms=2000, ttft_token_ms=0.21, tpot_ms=61).is_met(record)
    assert not Targets(ttft_ms=2000, ttft_token_ms=0.19, tpot_ms=61).is_met(record)
    assert not Targets(ttft_ms=2000, ttft_token_ms=0.21, tpot_ms=59).is_met(record)
    assert not Targets().is_met(Record(arrival=arrival))


# --- the command and the table ---


def trace_file(folder: Path) -> Path:
    rng, rows = random.Random(2), []
    for i in range(40):
        blocks = [0, i % 5 + 1, 100 + i]
        row = {"timestamp": 200 * i, "input_length": 1025 + rng.randrange(400), "output_length": 9, "hash_ids": blocks}
        rows.append(json.dumps(row))
    path = folder / "small.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_the_command_tells_one_json_line_for_each_policy(tmp_path: Path) -> None:
    options = ["replay", "--trace", str(trace_file(tmp_path)), "--prefill", "2", "--decode", "2", "--json"]
    done = CliRunner().invoke(app, [*options, "--policy", "cost", "--policy", "dynamo", "--seed", "1"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [row["policy"] for row in rows] == ["cost", "dynamo"]
    for row in rows:
        assert row["finished"] == row["requests"] == row["good"]
        assert row["hit_rate"] > 0
    shown = CliRunner().invoke(app, [*options[:-1], "--cost-model", "smollm2-135m-cpu"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    assert "round-robin" not in shown.output
    assert "cost" in shown.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--policy", "luck", "--policy must be"), ("--cost-model", "x", "--cost-model must be"),
     ("--prefill", "0", "--prefill"), ("--scale-rate", "0", "--scale-rate")],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_its_name(tmp_path: Path, option: str, value: str, message: str) -> None:
    done = CliRunner().invoke(app, ["replay", "--trace", str(trace_file(tmp_path)), option, value])
    assert done.exit_code == 1
    assert message in done.output


def test_the_table_takes_the_place_between_its_markers(tmp_path: Path) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    row = outcome(replay(conversations(3, 2)), SMALL, Targets())
    _append(results, {"kind": "saturation", "trace": "t", "policy": "cost", "scale_rate": 3.5})
    for seed in (1, 2):
        figures = {"good_share": row.good_share, "goodput": row.goodput, "hit_rate": row.hit_rate}
        _append(results, {"kind": "cell", "trace": "t", "load": 0.8, "policy": "cost", "seed": seed, **figures,
                          "ttft_ms": row.ttft_ms, "tpot_ms": row.tpot_ms, "prefill_balance": 1.0})  # fmt: skip
    assert Cell("t", 0.8, "cost", 2) in read(results)[0]
    write(results, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 0.8 | cost | 100.0 % |" in text
    assert table(results) in text
    with pytest.raises(ValueError, match="lacks the lines"):
        write(results, results)
