"""`pdray bench` against a server whose timing is written down: what it reports is what the script did."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvstore.errors import ConfigError
from services.bench.fake import Behaviour, FakeServer, Stall, start
from services.bench.load.options import parser
from services.bench.load.records import Record
from services.bench.load.run import bench
from services.bench.load.trace import Replay, read_trace
from services.protocol.errors import ErrorCode, RequestError
from tests.fronts import failing, make_core, running, saying
from tests.integration.serving import until

CONVERSATION = Path(__file__).parents[3] / "shared/data/traces/mooncake_conversation.jsonl"
PDRAY = [sys.executable, "-m", "services.cli"]


@asynccontextmanager
async def fake(vocab_size: int = 50000, **how: Any) -> AsyncIterator[tuple[FakeServer, int]]:
    """A fake server in this loop, and its port."""
    server = FakeServer(Behaviour(**how), [], Stall(), vocab_size)
    listening = await start(server, 0)
    try:
        yield server, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await asyncio.sleep(0.01)  # lets closed connections go


async def run(port: int, *arguments: str) -> tuple[dict[str, Any], list[Record]]:
    options = parser().parse_args(["--base-url", f"http://127.0.0.1:{port}", *arguments])
    result, records = await bench(options, Console(quiet=True))
    return result, list(records)


async def run_fake(behaviours: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Record]]:
    """One request for each behaviour, one after the other."""
    async with fake() as (server, port):
        server.script = [{}, *behaviours]  # the probe for ids comes first
        return await run(port, "--max-concurrency", "1", "--num-prompts", str(len(behaviours)), *SMALL)


SMALL = ("--random-input-len", "40", "--random-output-len", "6", "--seed", "7")


@contextmanager
def fake_process(*arguments: str) -> Iterator[str]:
    """A fake server in a process of its own; its URL."""
    command = [sys.executable, "-m", "services.bench.fake", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()
            process.wait(10)


def command(url: str, *arguments: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """`pdray bench` as a user starts it; the last line of its output is the result."""
    done = subprocess.run([*PDRAY, "bench", "--base-url", url, *arguments], capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def arrivals_of(url: str) -> list[float]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/fake/requests", timeout=10) as reply:
        return [row["at_s"] for row in json.load(reply)]


@pytest.mark.slow  # figures within 5 % need a machine that is not busy; on a virtual clock: test_bench_virtually
def test_a45_waiting_in_the_client_is_latency() -> None:
    """Fixed 300 ms, ten a second, one at a time, twelve requests: mean 1.4 s, not 0.3 s; and goodput knows it."""
    with fake_process("--ttft-ms", "300") as url:
        result, done = command(
            url, "--request-rate", "10", "--burstiness", "inf", "--max-concurrency", "1", "--num-prompts", "12",
            "--random-input-len", "20", "--random-output-len", "1", "--goodput", "ttft:1000", "tpot:60",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert result["mean_ttft_ms"] == pytest.approx(1400, rel=0.05)
    assert result["mean_e2el_ms"] == pytest.approx(1400, rel=0.05)
    assert result["mean_service_e2el_ms"] == pytest.approx(300, rel=0.05)
    assert result["p99_tpot_ms"] is None
    assert "n/a" in done.stdout
    assert result["completed"] == 12
    assert 0.2 < result["request_goodput"] / result["request_throughput"] < 0.5  # 0.3 s + 0.2 s each ≤ 1 s: four of 12
    assert "12/12" not in done.stdout  # progress is no data


async def test_fifty_answers_of_one_token_have_no_tpot() -> None:
    async with fake() as (_, port):
        result, _ = await run(port, "--num-prompts", "50", "--random-input-len", "20", "--random-output-len", "1")
    assert (result["completed"], result["total_output_tokens"]) == (50, 50)
    assert result["mean_tpot_ms"] is result["mean_itl_ms"] is None
    assert result["mean_ttft_ms"] > 0


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"end": "error_event"}, "error_event"),
        ({"end": "cut"}, "closed"),
        ({"end": "empty_200"}, "empty"),
        ({"end": "no_answer", "tokens": 0}, "empty"),
        ({"end": "no_answer"}, None),  # [DONE] without a finish reason is an end
        ({"end": "http_error", "status": 503}, "http_503"),
        ({"end": "http_error", "status": 429}, "http_429"),
    ],
)
async def test_what_ends_badly_is_a_failure(how: dict[str, Any], kind: str | None) -> None:
    result, records = await run_fake([{}, how, {}])
    assert [r.error_kind for r in records] == ["", kind or "", ""]
    assert result["completed"] == (3 if kind is None else 2)
    assert result["total_output_tokens"] == 6 * result["completed"]
    assert result["errors"] == ({} if kind is None else {kind: 1})


@pytest.mark.parametrize(
    ("how", "tokens", "chunks"),
    [
        ({"tokens_per_chunk": 4}, 6, 2),
        ({"tokens_per_chunk": 0}, 6, 1),
        ({"tokens": 0}, 0, 0),
        ({"text": "\u2028\u2029\u0085"}, 6, 6),
        ({"text": "data: x\n\ndata: [DONE]\n\n"}, 6, 6),
        ({"text": ""}, 6, 0),
        ({"tokens": 1}, 1, 1),
    ],
)
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_totals_are_right_however_the_answer_is_cut(
    how: dict[str, Any], tokens: int, chunks: int, endpoint: str
) -> None:
    async with fake(**how) as (_, port):
        result, records = await run(port, "--num-prompts", "3", *SMALL, "--endpoint", endpoint)
    assert (result["completed"], result["failed"]) == (3, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 3 * tokens)
    assert {r.chunks for r in records} == {chunks}
    numbers = [v for v in result.values() if isinstance(v, float)]
    assert all(v >= 0 for v in numbers)
    assert "NaN" not in json.dumps(result)
    assert (result["mean_tpot_ms"] is None) == (tokens < 2 or chunks < 2)


async def test_pictures_are_sent_and_counted() -> None:
    async with fake() as (server, port):
        result, _ = await run(
            port, "--endpoint", "/v1/chat/completions", "--dataset-name", "random-mm", "--num-prompts", "3",
            "--random-mm-bucket-config", "{(64, 64, 1): 1}", "--random-mm-base-items-per-request", "2",
            "--random-input-len", "20", "--random-output-len", "4",
        )  # fmt: skip
        assert [request["prompt_tokens"] for request in server.requests] == [22] * 3
    assert (result["completed"], result["num_pictures"], result["total_output_tokens"]) == (3, 6, 12)


async def test_a_server_without_usage_makes_the_run_invalid() -> None:
    async with fake(has_usage=False) as (_, port):
        result, _ = await run(port, "--num-prompts", "2", *SMALL)
    assert result["completed"] == 2
    assert not result["valid"]
    assert result["cache_hit_rate"] is None


async def test_warm_ups_are_sent_and_left_out() -> None:
    async with fake() as (server, port):
        result, records = await run(port, "--num-prompts", "4", "--num-warmups", "3", *SMALL)
        assert len(server.requests) == 1 + 3 + 4  # the probe for ids, too
    assert [r.index for r in records] == [0, 1, 2, 3]
    assert (result["completed"], result["num_warmups"], result["total_output_tokens"]) == (4, 3, 24)
    assert result["cache_hit_rate"] == 0


async def test_the_hit_rate_is_that_of_the_shared_prefixes() -> None:
    arguments = (
        "--dataset-name", "prefix_repetition", "--num-prompts", "20", "--prefix-repetition-num-prefixes", "2",
        "--prefix-repetition-prefix-len", "64", "--prefix-repetition-suffix-len", "64", "--max-concurrency", "1",
        "--prefix-repetition-output-len", "2",
    )  # fmt: skip
    async with fake() as (_, port):
        cold, _ = await run(port, *arguments)
        warm, _ = await run(port, *arguments)
        other, _ = await run(port, *arguments, "--seed", "5")
    expected = 18 * 64 / (20 * 128)
    assert cold["cache_hit_rate"] == cold["shared_prompt_rate"] == pytest.approx(expected)
    assert not cold["warm_cache"]
    assert warm["warm_cache"]
    assert warm["cache_hit_rate"] > 0.8
    assert not other["warm_cache"]


@pytest.mark.parametrize(("vocab_size", "form"), [(50000, "token_ids"), (600, "token_ids"), (100, "text")])
async def test_prompts_are_ids_where_the_server_takes_them(vocab_size: int, form: str) -> None:
    async with fake(vocab_size=vocab_size) as (_, port):
        result, _ = await run(port, "--num-prompts", "3", *SMALL)
    assert (result["prompt_form"], result["completed"], result["total_input_tokens"]) == (form, 3, 120)


async def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"not ready after 0 s.*127\.0\.0\.1:{port}"):
            await run(port, "--ready-check-timeout-sec", "0", *SMALL)


async def test_a_request_past_its_time_is_a_failure() -> None:
    async with fake(ttft_ms=60_000) as (server, port):
        server.script = [{"ttft_ms": 0}, {}, {"ttft_ms": 0}]  # the first is the probe for ids
        result, records = await run(port, "--num-prompts", "2", *SMALL, "--request-timeout-sec", "0.2")
    assert sorted(r.error_kind for r in records) == ["", "timeout"]
    assert result["completed"] == 1


async def test_a_pdray_tells_where_it_spent_the_time(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.flow.script = saying("Hello world, once upon a time", cached_tokens=16)
    async with running(core) as fronts:
        result, records = await run(fronts.http_port, "--num-prompts", "5", "--max-concurrency", "1", *SMALL)
    assert result["completed"] == 5
    phases = result["server_phases"]
    assert phases["requests"] == 5
    ttft = sum(part["mean"] for name, part in phases["parts_ms"].items() if name in ("accept", "tokenize", "prefill"))
    assert ttft <= result["mean_ttft_ms"]
    assert {"accept", "tokenize", "router_queue", "prefill", "first_emit", "decode"} <= phases["parts_ms"].keys()
    assert result["total_cached_tokens"] == 5 * 16
    assert all(r.output_tokens == 6 for r in records)


async def test_a_stream_of_pdray_that_fails_is_a_failure(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.flow.script = failing(RequestError(ErrorCode.INTERNAL, "the worker died"), after="Hello world")
    async with running(core) as fronts:
        result, _ = await run(fronts.http_port, "--num-prompts", "3", *SMALL, "--endpoint", "/v1/chat/completions")
    assert (result["completed"], result["errors"]) == (0, {"error_event": 3})
    assert result["invalid_reasons"] == ["no request succeeded"]


def test_arrivals_do_not_slow_while_a_server_stalls_for_five_seconds(tmp_path: Path) -> None:
    with fake_process("--ttft-ms", "20", "--stall-at-s", "1", "--stall-s", "5") as url:
        result, done = command(
            url, "--request-rate", "20", "--num-prompts", "80", "--random-input-len", "10", "--random-output-len", "3",
            "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json",
        )  # fmt: skip
        seen = arrivals_of(url)[1:]  # past the probe for ids
    due = [row["due_ms"] / 1000 for row in json.loads((tmp_path / "r.json").read_text())["requests"]]
    assert done.returncode in (0, 3), done.stderr
    assert result["completed"] == len(seen) == 80
    late = (np.array(seen) - seen[0]) - np.array(due)
    assert np.abs(late).max() < 1  # a loop that waited for answers would be up to 5 s late
    assert result["max_client_lag_ms"] < 1000
    stalled = [x for x in due if 1.5 < x < 4]
    assert len(stalled) > 20
    assert result["p90_ttft_ms"] > 2000


def test_a_run_ended_by_ctrl_c_reports_what_it_has_and_is_invalid() -> None:
    arguments = ["--request-rate", "20", "--burstiness", "inf", "--num-prompts", "2000", *SMALL]
    with fake_process() as url:
        process = subprocess.Popen(
            [*PDRAY, "bench", "--base-url", url, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            until("ten requests came", lambda: len(arrivals_of(url)) > 10, period_s=0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 3, err
    result = json.loads(out.splitlines()[-1])
    assert result["invalid_reasons"] == ["the run was interrupted"]
    assert 5 < result["completed"] < 2000


def test_wrong_options_are_refused_with_their_name() -> None:
    done = subprocess.run([*PDRAY, "bench", "--num-prompts", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--num-prompts" in done.stderr


class BareTimer(threading.Thread):
    """Wakes at the given offsets and does nothing else: how late a machine lets anyone be."""

    def __init__(self, offsets_s: list[float]) -> None:
        super().__init__(daemon=True)
        self._offsets_s = offsets_s
        self.late_ms: list[float] = []

    def run(self) -> None:
        start_s = time.monotonic()
        for offset_s in self._offsets_s:
            while (left_s := start_s + offset_s - time.monotonic()) > 0:
                time.sleep(left_s)
            self.late_ms.append((time.monotonic() - start_s - offset_s) * 1000)


@pytest.mark.slow
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the public trace is not on this machine")
def test_two_minutes_of_the_conversation_trace_keep_their_timestamps_within_five_ms() -> None:
    replay = Replay(end_s=120)
    lines = replay.cut(read_trace(CONVERSATION))
    due = replay.offsets_s(lines)
    with fake_process("--ttft-ms", "200") as url:
        timer = BareTimer(due)
        timer.start()
        result, _ = command(
            url, "--dataset-name", "timed_trace", "--dataset-path", str(CONVERSATION), "--trace-end-s", "120",
            "--trace-length-scale", "0.02",
        )  # fmt: skip
        seen = np.array(arrivals_of(url)[1:])
        timer.join(10)
    assert result["completed"] == len(seen) == len(due)
    late_ms = np.percentile(np.abs((seen - seen[0]) - np.array(due)) * 1000, 99)
    bare_ms = np.percentile(timer.late_ms, 99)
    if late_ms >= 5 and bare_ms > 3:
        pytest.skip(f"this machine cannot tell: a bare timer is late by {bare_ms:.1f} ms, the replay by {late_ms:.1f}")
    assert late_ms < 5
