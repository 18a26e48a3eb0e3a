"""Scenarios: files that are read strictly, rounds that are judged honestly, and a page that hides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvstore.errors import ConfigError
from services.bench.load.main import main
from services.bench.load.options import parser
from services.bench.scenarios import command
from services.bench.scenarios.findings import HOLDS, OPEN, OPPOSITE, UNKNOWN, judge
from services.bench.scenarios.page import page
from services.bench.scenarios.runner import Measurement, options_of
from services.bench.scenarios.scenario import Expectation, Scenario, load_scenario, names
from services.bench.scenarios.servers import Running, arguments_of
from services.config import load

FILE = """
title: A title
claim: B is sooner.
note: A note.
baseline: a
candidate: b
settings: {prefill: 0, decode: 0, mixed: 1, engine.block_size: 32}
sides:
  a: {router.policy: round-robin}
  b: {router.policy: cost}
cases:
  - name: by capacity
    seconds: 10
    capacity: {users: 4, requests: 8, part: 0.5}
    load: {random-input-len: 20, goodput: ["ttft:500", "tpot:50"]}
    expect:
      - {metric: mean_ttft_ms, be: lower}
      - {metric: request_goodput, be: not_lower}
  - name: by number
    requests: 6
    settings: {engine.block_size: 16}
    load: {max-concurrency: 1}
    expect: [{metric: cache_hit_rate, be: higher}]
"""
RUNNING = {"a": Running("http://a", "pdray serve --set a=1"), "b": Running("http://b", "pdray serve --set b=1")}


def expected(be: str) -> Expectation:
    return Expectation(metric="m", be=be)


def rounds(*pairs: tuple[float, float]) -> list[tuple[float | None, float | None]]:
    return list(pairs)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    return load_scenario(str(file))


@pytest.mark.parametrize("name", names())
def test_what_ships_can_be_served_and_asked_for(name: str) -> None:
    """Settings that `pdray serve` knows, options that `pdray bench` knows, figures that a result has."""
    shipped = load_scenario(name)
    for case in shipped.cases:
        for side in shipped.sides:
            pairs = [x.partition("=")[::2] for x in arguments_of(shipped.settings_of(side, case)) if x != "--set"]
            load(None, dict(pairs), {}).check_pairs()
        options = parser().parse_args([*options_of(case.load), "--num-prompts", "3"])
        assert case.expect
        for expectation in case.expect:
            assert expectation.metric.endswith(("_ms", "_goodput", "_throughput", "_rate"))
            assert expectation.metric != "request_goodput" or options.goodput
    assert len(shipped.claim) > 40


def test_the_four_claims_ship() -> None:
    assert names() == ["admission", "cache_aware", "layer_by_layer", "prefill_decode"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("claim:", "claims:", "claims is no field"),
        ("be: lower", "be: less", "got 'less'"),
        ("    seconds: 10", "    seconds: 0", "give seconds or requests"),
        ("    capacity: {users: 4, requests: 8, part: 0.5}\n", "", "seconds need a capacity"),
        ("baseline: a", "baseline: c", "sides must be 'c' and 'b'"),
        ("users: 4", "user: 4", "user is no field"),
        ("title: A title\n", "", "title"),
        ("cases:", "cases: []\nnote2:", "note2 is no field"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words):
        load_scenario(str(file))


def test_an_unknown_name_is_refused_with_those_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "nothing"]) == 1
    assert "prefill_decode" in capsys.readouterr().err


def test_the_list_shows_names_and_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names())


@pytest.mark.parametrize(
    ("be", "pairs", "verdict"),
    [
        ("lower", [(100, 50), (110, 56), (90, 44)], HOLDS),
        ("lower", [(50, 100), (56, 110), (44, 90)], OPPOSITE),
        ("higher", [(50, 100), (56, 110), (44, 90)], HOLDS),
        ("lower", [(100, 90), (100, 130), (100, 70)], OPEN),
        ("lower", [(100, 50)], OPEN),  # one round tells nothing
        ("not_higher", [(100, 101), (100, 99), (100, 102)], HOLDS),
        ("not_higher", [(100, 90), (100, 130), (100, 70)], OPEN),  # too unsteady to say that it is no worse
        ("not_higher", [(100, 130), (100, 131), (100, 132)], OPPOSITE),
        ("not_higher", [(100, 104), (100, 105), (100, 106)], HOLDS),  # worse, but by less than a tenth
        ("not_lower", [(100, 70), (100, 71), (100, 72)], OPPOSITE),
        ("higher", [(0, 0.4), (0, 0.5), (0, 0.3)], HOLDS),  # no ratio, but every round agrees
        ("higher", [(0, 0.4), (0.1, 0.0), (0, 0.3)], OPEN),
        ("not_lower", [(0, 0), (0, 0.0), (0, 0.1)], HOLDS),
        ("lower", [(0, 1), (0, 1), (0, 2)], OPPOSITE),
        ("lower", [], UNKNOWN),
    ],
)
def test_rounds_are_judged(be: str, pairs: list[tuple[float, float]], verdict: str) -> None:
    assert judge("case", expected(be), rounds(*pairs)).verdict == verdict


def test_drift_that_both_sides_share_does_not_blur_the_change() -> None:
    found = judge("case", expected("lower"), rounds((100, 80), (200, 161), (400, 319)))
    assert found.verdict == HOLDS
    assert (found.baseline, found.candidate) == (200, 161)
    assert found.change == pytest.approx(-0.2, abs=0.01)
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.2 < found.high < -0.15


def test_a_round_without_a_figure_is_left_out() -> None:
    found = judge("case", expected("lower"), [(100.0, None), (None, 3.0), (100.0, 50.0)])
    assert (found.baseline, found.candidate, found.verdict) == (100, 50, OPEN)
    assert judge("case", expected("lower"), [(None, 1.0)]).verdict == UNKNOWN


def test_no_difference_is_called_one_in_twenty_times() -> None:
    rng = np.random.default_rng(5)
    verdicts = [
        judge("c", expected("lower"), [(float(a), float(b)) for a, b in np.exp(rng.normal(0, 0.2, (3, 2)))]).verdict
        for _ in range(2000)
    ]
    wrong = 1 - verdicts.count(OPEN) / 2000
    assert 0.03 < wrong < 0.07


class Loads:
    """Stands for `pdray bench`: side b takes 70 % of the time of side a; the machine slows with every run."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, url: str, options: Sequence[str]) -> dict[str, Any]:
        self.calls.append((url, list(options)))
        slower = 1 + 0.01 * len(self.calls)
        is_b = url == "http://b"
        return {
            "completed": 8, "failed": 0, "request_throughput": 4.0, "request_goodput": 2.0, "valid": True,
            "mean_ttft_ms": 100 * slower * (0.7 if is_b else 1), "cache_hit_rate": 0.5 if is_b else 0.0,
            "median_ttft_ms": 100.0, "median_e2el_ms": None, "secret": 1,
        }  # fmt: skip


def measured(scenario: Scenario, form: str) -> tuple[dict[str, Any], Loads]:
    loads = Loads()
    measurement = Measurement(scenario, form, loads, lambda _: None)
    for case in scenario.cases:
        measurement.measure(case, RUNNING)
    return measurement.result(), loads


def test_sides_alternate_with_equal_prompts_at_a_rate_from_the_baseline(scenario: Scenario) -> None:
    result, loads = measured(scenario, "short")
    assert loads.calls[0][0] == "http://a"
    assert "--request-rate" not in loads.calls[0][1]
    first = loads.calls[1:7]
    assert [url[-1] for url, _ in first] == ["a", "b", "b", "a", "a", "b"]
    for (_, one), (_, other) in zip(first[::2], first[1::2], strict=True):
        assert one == other
    seeds = [options[options.index("--seed") + 1] for _, options in loads.calls]
    assert len(set(seeds)) == 1 + 3 + 3
    options = first[0][1]
    assert options[options.index("--request-rate") + 1] == "2"  # half of 4
    assert options[options.index("--num-prompts") + 1] == "20"
    assert options[options.index("--goodput") + 1 : options.index("--goodput") + 3] == ["ttft:500", "tpot:50"]
    assert "--request-rate" not in loads.calls[7][1]
    verdicts = {(f["case"], f["metric"]): f["verdict"] for f in result["findings"]}
    assert verdicts == {
        ("by capacity", "mean_ttft_ms"): HOLDS,
        ("by capacity", "request_goodput"): HOLDS,
        ("by number", "cache_hit_rate"): HOLDS,
    }
    assert result["capacities"] == {"by capacity": 4.0}
    assert not any("secret" in run["result"] for run in result["runs"])
    json.dumps(result, allow_nan=False)


def test_an_invalid_run_decides_nothing(scenario: Scenario) -> None:
    class Late(Loads):
        def __call__(self, url: str, options: Sequence[str]) -> dict[str, Any]:
            result = super().__call__(url, options)
            late = {"valid": False, "invalid_reasons": ["the client sent requests late"]}
            return result | late if len(self.calls) == 3 else result

    measurement = Measurement(scenario, "short", Late(), lambda _: None)
    measurement.measure(scenario.cases[0], RUNNING)
    found = {f.metric: f.verdict for f in measurement.findings}
    assert found["mean_ttft_ms"] == OPEN  # two rounds are left, and three are needed
    assert sum(not run.result["valid"] for run in measurement.runs) == 1


def test_the_tiny_form_is_one_round_and_claims_nothing(scenario: Scenario) -> None:
    result, loads = measured(scenario, "tiny")
    assert len(loads.calls) == 5
    assert {f["verdict"] for f in result["findings"]} == {OPEN}


def test_the_page_has_every_figure_its_command_and_what_does_not_hold(scenario: Scenario) -> None:
    result, _ = measured(scenario, "short")
    bad = judge("by number", expected("lower"), rounds((1, 2), (1, 2.1), (1, 2)))
    result["findings"].append(asdict(bad))
    result["runs"][0]["result"] |= {"valid": False, "invalid_reasons": ["the client sent requests late"]}
    text = page([result])
    for words in (
        "# Benchmarks", "## A title", "B is sooner.", "A note.", "-30%", "| holds |", "**does not hold**",
        "by number: `m` does not hold", "no valid run: the client sent requests late",
        "pdray serve --set b=1    # b",
        "pdray bench --base-url http://127.0.0.1:8000 --random-input-len 20", "4.00 requests/s", "cores of",
    ):  # fmt: skip
        assert words in text, words
    assert "| A title | 3 | 1 | 0 |" in text
    assert "secret" not in text


def test_lines_are_replaced_by_newer_ones_and_the_page_is_written_from_all(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = measured(scenario, "short")
    made = iter([result, {**result, "title": "Newer"}, {**result, "scenario": "other", "title": "Other"}])
    monkeypatch.setattr(command, "run_scenario", lambda *_: next(made))
    file, text = tmp_path / "r.jsonl", tmp_path / "docs" / "b.md"
    for _ in range(3):
        arguments = ["admission", "--output", str(file), "--page", str(text)]
        assert command.main(arguments, Console(), Console(stderr=True)) == 0
    assert len(file.read_text().splitlines()) == 2
    assert "## Newer" in text.read_text()
    assert "## Other" in text.read_text()
    assert "## A title" not in text.read_text()
    before = text.read_text()
    assert main(["scenario", "--only-page", "--output", str(file), "--page", str(text)]) == 0
    assert text.read_text() == before
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scenario"] == "other"


def test_settings_become_options_that_serve_reads() -> None:
    assert arguments_of({"transfer.layerwise": False, "mixed": 2}) == [
        "--set",
        "transfer.layerwise=false",
        "--set",
        "mixed=2",
    ]
    assert math.isclose(load(None, {"slo.ttft_ms": "2000"}, {}).slo.ttft_ms, 2000)
