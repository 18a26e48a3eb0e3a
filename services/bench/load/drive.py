"""Runs jobs against a client: when each is sent, and nothing else.

    open loop:    due ─► [wait for one of max_concurrency slots] ─► send      the clock decides; a stalled server
                                                                              does not slow the next arrival
    closed loop:  user free ─► send                                           the server decides

In the open loop the wait for a slot is part of the latency. A closed loop shows no overload: its users wait politely.
In either, the next turn of a conversation is due a time to think after the answer before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.bench.load.client import OnRecord
from services.bench.load.http import Clock
from services.bench.load.job import Job, every
from services.bench.load.records import Record

HEARTBEAT_S = 0.02
SKIPPED = "skipped: a turn before it failed"


class Sends(Protocol):
    """What the loops need of a client."""

    @property
    def clock(self) -> Clock: ...

    def encode(self, job: Job) -> None: ...

    def send(self, job: Job, due_s: float, lag_from_s: float | None) -> Awaitable[Record]: ...


@dataclass(slots=True)
class Watch:
    """How late the tool's own event loop was, sample by sample: arrival times of tokens are late by as much."""

    lags_s: list[float] = field(default_factory=list)

    async def run(self, clock: Clock) -> None:
        """Until it is cancelled."""
        while True:
            due_s = clock() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.lags_s.append(max(0.0, clock() - due_s))


async def open_loop(jobs: Sequence[Job], client: Sends, max_concurrency: int | None, on_record: OnRecord) -> None:
    """Send each job when it is due; returns when all have ended. Cancelling it cancels what runs."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    start_s = client.clock()

    async def send(job: Job, due_s: float) -> Record:
        if slots is None:
            return await client.send(job, due_s, due_s)
        has_to_wait = slots.locked()
        async with slots:
            return await client.send(job, due_s, None if has_to_wait else due_s)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            assert job.at_s is not None
            await asyncio.sleep(0)  # the one before it leaves first, also where all are late
            client.encode(job)
            due_s = start_s + job.at_s
            await _until(due_s, client.clock)
            group.create_task(_turns(job, due_s, client, send, on_record))


async def closed_loop(jobs: Sequence[Job], client: Sends, users: int, on_record: OnRecord) -> None:
    """``users`` at a time, each sending its next job when its last one has ended."""
    waiting: Iterator[Job] = iter(jobs)

    async def send(job: Job, due_s: float) -> Record:
        return await client.send(job, due_s, due_s)

    async def user() -> None:
        for job in waiting:
            client.encode(job)
            await _turns(job, client.clock(), client, send, on_record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, len(jobs))):
            group.create_task(user())


async def _turns(
    job: Job, due_s: float, client: Sends, send: Callable[[Job, float], Awaitable[Record]], on_record: OnRecord
) -> None:
    """A request and those that follow it; where one fails, the rest of its conversation has failed too."""
    record = await send(job, due_s)
    on_record(record)
    while job.then is not None and not record.error:
        job = job.then
        client.encode(job)
        due_s = record.done_s + job.think_s
        await _until(due_s, client.clock)
        record = await send(job, due_s)
        on_record(record)
    for left in every([job.then] if job.then is not None else []):
        now_s = client.clock()
        on_record(Record(index=left.index, due_s=now_s, sent_s=now_s, done_s=now_s, error=SKIPPED, tenant=left.tenant))


async def _until(due_s: float, clock: Clock) -> None:
    while (left_s := due_s - clock()) > 0:
        await asyncio.sleep(left_s)
