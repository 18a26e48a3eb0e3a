"""The whole tool against the fake server on a virtual clock: what it reports is exactly what was scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from rich.console import Console

from services.bench.load.options import parser
from services.bench.load.records import Record
from services.bench.load.run import bench
from services.bench.load.sweep.command import sweep_parser
from services.bench.load.sweep.run import sweep
from tests.unit.virtual_net import run_over_sockets, served

ONE_TOKEN = ("--random-input-len", "20", "--random-output-len", "1", "--burstiness", "inf")
TALKS = (
    "--dataset-name", "multi_turn", "--multi-turn-num-turns", "3", "--multi-turn-first-len", "32",
    "--multi-turn-next-len", "16", "--multi-turn-output-len", "4", "--multi-turn-think-burstiness", "inf",
)  # fmt: skip


async def run(url: str, *arguments: str) -> tuple[dict[str, Any], list[Record]]:
    options = parser().parse_args(["--base-url", url, "--disable-tqdm", *arguments])
    result, records = await bench(options, Console(quiet=True), asyncio.get_running_loop().time)
    return result, list(records)


def virtually(main: Coroutine[Any, Any, Any]) -> Any:
    return run_over_sockets(main)


def test_a45_a_cap_of_one_on_300_ms_at_ten_a_second_is_1400_ms() -> None:
    async def main() -> dict[str, Any]:
        async with served(ttft_ms=300) as (_, url):
            result, _ = await run(
                url, "--request-rate", "10", "--num-prompts", "12", "--max-concurrency", "1", *ONE_TOKEN
            )
            return result

    result = virtually(main())
    assert result["mean_e2el_ms"] == pytest.approx(1400, abs=0.1)
    assert result["p99_e2el_ms"] == pytest.approx(2478, abs=0.1)
    assert result["mean_service_e2el_ms"] == pytest.approx(300, abs=0.1)
    assert result["mean_tpot_ms"] is None
    assert result["valid"]


def test_ttft_tpot_and_itl_are_those_of_the_script() -> None:
    async def main() -> dict[str, Any]:
        async with served(ttft_ms=120, itl_ms=40, tokens_per_chunk=2) as (_, url):
            arguments = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "9")
            result, _ = await run(url, "--request-rate", "3", *arguments)
            return result

    result = virtually(main())
    assert result["mean_ttft_ms"] == result["p99_ttft_ms"] == pytest.approx(120, abs=0.1)
    assert result["mean_itl_ms"] == pytest.approx(40, abs=0.1)
    assert result["mean_tpot_ms"] == pytest.approx(4 * 40 / 8, abs=0.1)
    assert result["tokens_per_chunk"] == pytest.approx(9 / 5, abs=1e-3)


def test_a_turn_asks_with_all_that_was_said_and_comes_after_the_time_to_think() -> None:
    async def main() -> tuple[dict[str, Any], list[Record], list[dict[str, Any]]]:
        async with served(ttft_ms=100) as (server, url):
            result, records = await run(
                url, *TALKS, "--num-prompts", "6", "--request-rate", "0.3", "--burstiness", "inf"
            )
            return result, records, server.requests

    result, records, requests = virtually(main())
    assert (result["completed"], result["num_prompts"], result["prompt_form"]) == (6, 6, "text")
    assert sorted(row["prompt_tokens"] for row in requests) == sorted([32, 32 + 4 + 16, 32 + 2 * 20] * 2)
    for first, second in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert records[second].due_s - records[first].done_s == pytest.approx(1.0, abs=1e-3)
    assert records[3].due_s - records[0].due_s == pytest.approx(10, abs=1e-3)  # three turns each: a third of the rate
    assert result["requested_input_tokens"] == result["total_input_tokens"]
    assert result["cache_hit_rate"] > 0.4
    assert not result["warm_cache"]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_closed_loop_of_conversations_keeps_its_users(endpoint: str) -> None:
    async def main() -> list[Record]:
        async with served(ttft_ms=100) as (_, url):
            _, records = await run(url, *TALKS, "--num-prompts", "8", "--max-concurrency", "1", "--endpoint", endpoint)
            return records

    records = virtually(main())
    assert [r.index for r in sorted(records, key=lambda r: r.due_s)] == list(range(8))
    assert all(r.ok and r.output_tokens == 4 for r in records)
    assert records[3].due_s == pytest.approx(records[2].done_s, abs=1e-3)  # the next conversation, without a pause


def test_a_conversation_that_fails_fails_all_its_turns() -> None:
    async def main() -> tuple[dict[str, Any], list[Record]]:
        async with served() as (server, url):
            server.script = [{}, {"end": "http_error"}, {}, {}, {}]
            return await run(url, *TALKS, "--num-prompts", "6", "--max-concurrency", "1")

    result, records = virtually(main())
    assert [r.error_kind for r in records] == ["", "http_503", "skipped", "", "", ""]
    assert (result["completed"], result["failed"]) == (4, 2)


def test_a_part_of_the_requests_is_hung_up_on_and_is_neither_success_nor_failure() -> None:
    async def main() -> tuple[dict[str, Any], list[Record], list[dict[str, Any]]]:
        async with served(ttft_ms=50, itl_ms=100) as (server, url):
            result, records = await run(
                url, "--num-prompts", "20", "--request-rate", "10", "--random-output-len", "20",
                "--random-input-len", "8",
                "--request-cancellation-rate", "25", "--request-cancellation-delay", "0.5", "--goodput", "e2el:3000",
            )  # fmt: skip
            return result, records, server.requests[1:]

    result, records, requests = virtually(main())
    assert (result["completed"], result["cancelled"], result["failed"], result["errors"]) == (15, 5, 0, {})
    assert result["total_output_tokens"] == 15 * 20
    assert result["goodput_share"] == 1
    assert {round(r.done_s - r.sent_s, 3) for r in records if r.is_cancelled} == {0.5}
    assert sum(not row["is_over"] for row in requests) == 5  # the server saw the client go


def test_tenants_send_with_their_keys_in_turn() -> None:
    async def main() -> tuple[dict[str, Any], list[str]]:
        async with served(ttft_ms=10) as (server, url):
            tenants = ("--tenant", "a=key-of-a", "--tenant", "b=key-of-b")
            result, _ = await run(url, "--num-prompts", "10", "--goodput", "ttft:5", *tenants, *ONE_TOKEN)
            return result, [row["key"] for row in server.requests]

    result, keys = virtually(main())
    assert keys[0] == "key-of-a"  # the tool's own question
    assert sorted(keys[1:]) == ["key-of-a"] * 5 + ["key-of-b"] * 5
    assert {name: (t["completed"], t["good_requests"]) for name, t in result["tenants"].items()} == {
        "a": (5, 0),
        "b": (5, 0),
    }
    assert "key-of" not in str(result)


def sweep_of(*arguments: str, slots: int, **how: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with served(slots=slots, **how) as (_, url):
            options = sweep_parser().parse_args(["--base-url", url, "--disable-tqdm", *ONE_TOKEN, *arguments])
            return await sweep(options, Console(quiet=True), asyncio.get_running_loop().time)

    return virtually(main())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_sweep_finds_the_capacity_of_a_server_that_has_one() -> None:
    """Two at once for 400 ms each are 5 a second; a little more is kept for ten seconds, as the bound has room."""
    found = sweep_of(
        "--goodput", "e2el:700", "--probe-s", "10", "--repeats", "1", "--precision", "0.03", slots=2, ttft_ms=400
    )
    assert found["phase"] == "done"
    assert found["max_request_rate"] <= found["lowest_failing_rate"] <= 1.03 * found["max_request_rate"] + 1e-9
    assert 5.0 <= found["max_request_rate"] <= 5.25  # it may fall behind by 300 ms in 9 s
    assert found["request_goodput"] == pytest.approx(found["max_request_rate"], rel=0.06)
    assert found["reference_drift"] == pytest.approx(1, abs=0.01)
    assert found["valid"]
    assert not found["has_drifted"]
    far = [p for p in found["probes"] if p["rate_rps"] > 7]
    assert far
    assert all(p["is_cut_short"] and p["result"]["completed"] < p["num_prompts"] for p in far)


def test_a_sweep_that_no_rate_can_meet_says_so() -> None:
    found = sweep_of(
        "--goodput", "e2el:300", "--min-rate", "0.5", "--probe-s", "5", "--min-requests", "3", slots=1, ttft_ms=400
    )
    assert (found["phase"], found["max_request_rate"], found["valid"]) == ("outside", None, False)
    assert "--min-rate" in found["invalid_reasons"][0]
