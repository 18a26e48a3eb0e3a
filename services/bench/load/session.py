"""A server that runs are measured against: found once, asked often.

server ready ─► ids ─► for each run: warm-ups ─► bodies encoded ─► drive ─► records
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvstore.errors import ConfigError
from services.bench.load.client import COMPLETIONS, Client, Form
from services.bench.load.drive import Watch, closed_loop, open_loop
from services.bench.load.http import Clock, Pool, Target
from services.bench.load.job import Job, every
from services.bench.load.plan import MULTI_TURN, SHAREGPT, Plan
from services.bench.load.progress import progress
from services.bench.load.prompts import IdRange, num_tokens
from services.bench.load.records import Record
from services.bench.load.server import Server, find_ids, find_server, tokenizer_ids
from services.bench.load.tenants import Tenants, read_key

ENCODED_AHEAD_TOKENS = 16_000_000  # about 100 MB of bodies made before the run; the rest while it waits for its due
PIXELS_PER_TOKEN = 32  # that make bodies as long
IsEnough = Callable[[Record], bool]
"""Told each record; True ends the run, which then is no whole one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's records, what its client cost, and how it ended."""

    records: Sequence[Record]
    loop_lags_s: Sequence[float]
    cpu_s: float
    is_interrupted: bool  # by Ctrl-C
    is_cut_short: bool  # by `IsEnough`


class Session:
    """Made by `session`; one run at a time."""

    def __init__(self, pool: Pool, server: Server, form: Form, client: Client) -> None:
        self.pool, self.server, self.form, self._client = pool, server, form, client

    async def ask(self, job: Job) -> Record:
        """One request by itself."""
        now_s = self._client.clock()
        return await self._client.send(job, now_s, now_s)

    async def run(self, plan: Plan, console: Console, *, is_quiet: bool, is_enough: IsEnough | None = None) -> Outcome:
        """Warm-ups, left out, and then the jobs of a plan."""
        client = self._client
        for job in plan.warmups:
            await self.ask(job)
        _encode_ahead(plan, client)
        gc.collect()
        gc.freeze()  # the collector need not look at the bodies during the run
        watch = Watch()
        heartbeat = asyncio.create_task(watch.run(client.clock))
        try:
            with progress(console, plan.num_requests, client.clock, is_off=is_quiet) as shown:
                drive = _Drive(is_enough, shown.count)
                cpu_s = time.process_time()
                if plan.loop == "open":
                    work = open_loop(plan.jobs, client, plan.max_concurrency, drive.on_record)
                else:
                    work = closed_loop(plan.jobs, client, plan.max_concurrency or 1, drive.on_record)
                await drive.until_over(work)
                cpu_s = time.process_time() - cpu_s
        finally:
            heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await heartbeat
            gc.unfreeze()
        client.forget()
        records = sorted(drive.records, key=lambda r: r.index)
        return Outcome(records, watch.lags_s, cpu_s, drive.is_interrupted, drive.is_cut_short)


class _Drive:
    """Collects a run's records and ends it early, on Ctrl-C or when enough was seen."""

    def __init__(self, is_enough: IsEnough | None, show: Callable[[Record], None]) -> None:
        self._is_enough, self._show = is_enough, show
        self._task: asyncio.Future[None] | None = None
        self.records: list[Record] = []
        self.is_interrupted = self.is_cut_short = False

    def on_record(self, record: Record) -> None:
        self.records.append(record)
        self._show(record)
        if self._is_enough is not None and not self.is_cut_short and self._is_enough(record):
            self.is_cut_short = True
            self._end()

    async def until_over(self, work: Coroutine[Any, Any, None]) -> None:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        self._task = task
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            await task
        except asyncio.CancelledError:
            if not self.is_interrupted and not self.is_cut_short:
                raise
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()

    def _interrupt(self) -> None:
        self.is_interrupted = True
        self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()


@contextlib.asynccontextmanager
async def session(
    options: argparse.Namespace, tenants: Tenants, clock: Clock = time.monotonic
) -> AsyncIterator[Session]:
    """A `Session` with the server that the options name.

    Raises:
        ConfigError: it is not there, or the options do not fit it.
    """
    pool = Pool(Target.parse(options.base_url), clock, _headers(options, tenants))
    try:
        server = await find_server(pool, options.model, options.ready_check_timeout_sec)
        form = await _form(options, pool, server)
        yield Session(pool, server, form, Client(pool, form, options.request_timeout_sec, tenants.keys))
    finally:
        await pool.close()


def _encode_ahead(plan: Plan, client: Client) -> None:
    ahead = 0
    for job in plan.jobs:
        ahead += num_tokens(job.item.prompt)
        ahead += sum(picture.height * picture.width // PIXELS_PER_TOKEN for picture in job.item.pictures)
        if ahead > ENCODED_AHEAD_TOKENS:
            break
        client.encode(job)


async def _form(options: argparse.Namespace, pool: Pool, server: Server) -> Form:
    ids: IdRange | None = None
    if options.endpoint == COMPLETIONS and options.dataset_name not in (MULTI_TURN, SHAREGPT):
        ids = tokenizer_ids(options.tokenizer) if options.tokenizer else await find_ids(pool, server.model)
    return Form(
        endpoint=options.endpoint,
        model=server.model,
        ids=ids,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=options.extra_body,
    )


def _headers(options: argparse.Namespace, tenants: Tenants) -> dict[str, str]:
    """Of every request; the tool's own questions carry the first tenant's key."""
    found: dict[str, str] = {}
    if key := tenants.keys.get(tenants.first) or (read_key(options.api_key) if options.api_key else ""):
        found["Authorization"] = f"Bearer {key}"
    for pair in options.header:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or any(c in pair for c in "\r\n"):
            raise ConfigError("--header: give it as KEY=VALUE")
        found[name.strip()] = value
    return found


def shared_by_turns(plan: Plan, records: Sequence[Record]) -> dict[int, int]:
    """Tokens that each request shares with one before it: later turns share all that was said, which is known now."""
    seen = {r.index: r for r in records}
    shared = dict(plan.shared)
    for job in every(plan.jobs):
        before = seen.get(job.index)
        if job.then is not None and before is not None and before.input_tokens is not None:
            shared[job.then.index] = before.input_tokens + (before.output_tokens or 0)
    return shared
