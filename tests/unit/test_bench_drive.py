"""When requests leave, on a clock that the test owns: figures are exact, and minutes cost nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.bench.load.arrivals import steady, unit_gaps
from services.bench.load.client import Job
from services.bench.load.drive import HEARTBEAT_S, Watch, closed_loop, open_loop
from services.bench.load.records import Record
from services.bench.load.summary import Conditions, summarize
from services.bench.load.trace import Replay, read_trace
from services.bench.load.workloads import Item
from tests.unit.virtual_loop import run_virtually

CONVERSATION = Path(__file__).parents[3] / "shared/data/traces/mooncake_conversation.jsonl"


class Scripted:
    """Stands for a client and its server: an answer of one token takes as long as ``service_s`` says."""

    def __init__(self, service_s: Callable[[float], float]) -> None:
        self._service_s = service_s
        self.clock = asyncio.get_running_loop().time
        self.sent: list[float] = []
        self.encoded: list[tuple[int, int]] = []  # (job, how many were sent by then)
        self.under_way = self.most_under_way = 0
        self.was_cancelled = 0

    def encode(self, job: Job) -> None:
        self.encoded.append((job.index, len(self.sent)))

    async def send(self, job: Job, due_s: float, lag_from_s: float | None) -> Record:
        sent_s = self.clock()
        self.sent.append(sent_s)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self._service_s(sent_s))
        except asyncio.CancelledError:
            self.was_cancelled += 1
            raise
        self.under_way -= 1
        end_s = self.clock()
        return Record(
            index=job.index,
            due_s=due_s,
            sent_s=sent_s,
            first_s=end_s,
            last_s=end_s,
            done_s=end_s,
            lag_s=None if lag_from_s is None else sent_s - lag_from_s,
            chunks=1,
            input_tokens=1,
            output_tokens=1,
        )


def jobs(at_s: list[float]) -> list[Job]:
    return [Job(i, Item((), 1), x) for i, x in enumerate(at_s)]


def drive(
    at_s: list[float], service_s: Callable[[float], float], limit: int | None = None
) -> tuple[Scripted, list[Record]]:
    async def main() -> tuple[Scripted, list[Record]]:
        client, records = Scripted(service_s), list[Record]()
        await open_loop(jobs(at_s), client, limit, records.append)
        return client, sorted(records, key=lambda r: r.index)

    return run_virtually(main())  # type: ignore[no-any-return]


def test_waiting_for_a_slot_is_part_of_the_latency() -> None:
    """300 ms each, ten a second, one at a time: the k-th request waits 200 ms longer than the one before it."""
    at_s = steady(unit_gaps(12, math.inf, np.random.default_rng(0)), 10.0).tolist()
    client, records = drive(at_s, lambda _: 0.3, limit=1)
    assert [r.e2el_s for r in records] == pytest.approx([0.3 + 0.2 * k for k in range(12)])
    result = summarize(records, Conditions())
    assert result["mean_e2el_ms"] == pytest.approx(1400)
    assert result["mean_ttft_ms"] == pytest.approx(1400)
    assert result["p99_e2el_ms"] == pytest.approx(2478)
    assert result["mean_service_e2el_ms"] == pytest.approx(300)
    assert result["mean_tpot_ms"] is None
    assert result["p99_client_lag_ms"] == pytest.approx(0, abs=1e-6)
    assert result["valid"]
    assert client.most_under_way == 1


def test_arrivals_do_not_slow_when_the_server_stalls_for_five_seconds() -> None:
    at_s = steady(unit_gaps(200, 1.0, np.random.default_rng(4)), 20.0).tolist()
    start = 1000.0

    def service_s(now_s: float) -> float:
        """Whatever comes between second 2 and 7 ends after second 7."""
        return max(0.05, start + 7 - now_s) if now_s > start + 2 else 0.05

    client, records = drive(at_s, service_s)
    assert client.sent == pytest.approx([start + x for x in at_s])
    stalled = [r for r in records if 2.5 < r.due_s - start < 3]
    assert stalled
    assert all(r.e2el_s and r.e2el_s > 4 for r in stalled)


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the public trace is not on this machine")
def test_a_replayed_trace_keeps_its_timestamps() -> None:
    replay = Replay(end_s=120)
    lines = replay.cut(read_trace(CONVERSATION))
    client, _ = drive(replay.offsets_s(lines), lambda _: 3.0)
    assert client.sent == pytest.approx([1000.0 + line.at_s - lines[0].at_s for line in lines])


def test_a_closed_loop_keeps_its_number_of_users_and_no_more() -> None:
    async def main() -> tuple[Scripted, list[Record]]:
        client, records = Scripted(lambda _: 0.5), list[Record]()
        await closed_loop([Job(i, Item((), 1)) for i in range(10)], client, 3, records.append)
        return client, records

    client, records = run_virtually(main())
    assert client.most_under_way == 3
    assert [r.e2el_s for r in records] == pytest.approx([0.5] * 10)
    assert max(client.sent) - min(client.sent) == pytest.approx(1.5)  # 4 rounds of 3, 3, 3 and 1


def test_bodies_are_made_before_they_are_due() -> None:
    client, _ = drive([0.0, 1.0, 2.0], lambda _: 0.1)
    assert client.encoded == [(0, 0), (1, 1), (2, 2)]
    assert client.sent == pytest.approx([1000.0, 1001.0, 1002.0])


def test_a_client_that_is_late_says_so() -> None:
    async def main() -> list[Record]:
        client, records = Scripted(lambda _: 0.1), list[Record]()
        loop = asyncio.get_running_loop()

        def block() -> None:
            loop._jumping.now_s += 0.4  # type: ignore[attr-defined]

        loop.call_at(loop.time() + 0.99, block)
        await open_loop(jobs([0.0, 1.0, 2.0]), client, None, records.append)
        return sorted(records, key=lambda r: r.index)

    records = run_virtually(main())
    assert [r.lag_s for r in records] == pytest.approx([0, 0.39, 0])
    assert records[1].e2el_s == pytest.approx(0.49)
    result = summarize(records, Conditions(max_lag_ms=100))
    assert not result["valid"]
    assert "sent requests late" in result["invalid_reasons"][0]


def test_a_loop_that_stands_still_is_seen_while_nothing_is_sent() -> None:
    async def main() -> list[float]:
        watch, loop = Watch(), asyncio.get_running_loop()
        task = asyncio.create_task(watch.run(loop.time))
        await asyncio.sleep(1)
        loop._jumping.now_s += 0.3  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        task.cancel()
        return watch.lags_s

    lags_s = run_virtually(main())
    assert max(lags_s) == pytest.approx(0.3, abs=1.01 * HEARTBEAT_S)
    assert sum(x > 0.01 for x in lags_s) == 1


def test_cancelling_the_loop_cancels_what_is_under_way() -> None:
    async def main() -> Scripted:
        client = Scripted(lambda _: 60.0)
        task = asyncio.create_task(open_loop(jobs([0.0, 0.0, 9.0]), client, None, lambda _: None))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return client

    client = run_virtually(main())
    assert client.was_cancelled == len(client.sent) == 2
