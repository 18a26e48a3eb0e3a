"""One run, start to end.

server ready ─► ids ─► warm-ups ─► bodies encoded ─► drive ─► summary ─► phases of a pdray
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvstore.errors import ConfigError
from services.bench.load.client import CHAT, COMPLETIONS, Client, Form
from services.bench.load.drive import Watch, closed_loop, open_loop
from services.bench.load.http import Pool, Target
from services.bench.load.plan import Plan, make_plan
from services.bench.load.progress import progress
from services.bench.load.prompts import IdRange, num_tokens
from services.bench.load.records import Record
from services.bench.load.server import Server, find_ids, find_server, server_phases, tokenizer_ids
from services.bench.load.summary import Conditions, Slo, summarize

ENCODED_AHEAD_TOKENS = 16_000_000  # about 100 MB of bodies made before the run; the rest while it waits for its due
TEMPLATE_TOKENS = 256  # what a server may put before every prompt that is text


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's records, what its client cost, and how it ended."""

    records: Sequence[Record]
    loop_lags_s: Sequence[float]
    cpu_s: float
    is_interrupted: bool


async def bench(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], Sequence[Record]]:
    """The result, with the keys of `summary`, and the records behind it.

    Raises:
        ConfigError: options that do not fit together, or a server that is not there.
    """
    slo, plan = Slo.parse(options.goodput), make_plan(options)
    pool = Pool(Target.parse(options.base_url), time.monotonic, _headers(options.header))
    try:
        server = await find_server(pool, options.model, options.ready_check_timeout_sec)
        form = await _form(options, pool, server)
        client = Client(pool, form, options.request_timeout_sec)
        for job in plan.warmups:
            now_s = client.clock()
            await client.send(job, now_s, now_s)
        outcome = await _drive(plan, client, console, is_quiet=options.disable_tqdm)
        conditions = Conditions(
            percentiles=options.metric_percentiles,
            slo=slo,
            max_lag_ms=options.max_client_lag_ms,
            loop_lags_s=outcome.loop_lags_s,
            shared_tokens=plan.shared,
            slack_tokens=TEMPLATE_TOKENS if form.ids is None else 0,
            is_interrupted=outcome.is_interrupted,
        )
        result = {**_settings(options, plan, form), **summarize(outcome.records, conditions)}
        result |= _cost(outcome, result["duration"])
        if server.is_pdray and not outcome.is_interrupted:
            result["server_phases"] = await server_phases(pool, [r.answer_id for r in outcome.records if r.ok])
        return result, outcome.records
    finally:
        await pool.close()


async def _form(options: argparse.Namespace, pool: Pool, server: Server) -> Form:
    ids: IdRange | None = None
    if options.endpoint == COMPLETIONS:
        ids = tokenizer_ids(options.tokenizer) if options.tokenizer else await find_ids(pool, server.model)
    return Form(
        endpoint=options.endpoint,
        model=server.model,
        ids=ids,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=options.extra_body,
    )


async def _drive(plan: Plan, client: Client, console: Console, *, is_quiet: bool) -> Outcome:
    ahead = 0
    for job in plan.jobs:
        ahead += num_tokens(job.item.prompt)
        if ahead > ENCODED_AHEAD_TOKENS:
            break
        client.encode(job)
    gc.collect()
    gc.freeze()  # the collector need not look at the bodies during the run
    records: list[Record] = []
    watch = Watch()
    with progress(console, len(plan.jobs), client.clock, is_off=is_quiet) as shown:

        def on_record(record: Record) -> None:
            records.append(record)
            shown.count(record)

        heartbeat = asyncio.create_task(watch.run(client.clock))
        cpu_s = time.process_time()
        try:
            if plan.loop == "open":
                work = open_loop(plan.jobs, client, plan.max_concurrency, on_record)
            else:
                work = closed_loop(plan.jobs, client, plan.max_concurrency or 1, on_record)
            is_interrupted = await _until_interrupted(work)
            cpu_s = time.process_time() - cpu_s
        finally:
            heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await heartbeat
            gc.unfreeze()
    records.sort(key=lambda r: r.index)
    return Outcome(records, watch.lags_s, cpu_s, is_interrupted)


async def _until_interrupted(work: Any) -> bool:
    """True where Ctrl-C ended the work before its end."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    is_interrupted = False

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not is_interrupted:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()
    return is_interrupted


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or any(c in pair for c in "\r\n"):
            raise ConfigError("--header: give it as KEY=VALUE")
        found[name.strip()] = value
    return found


def _settings(options: argparse.Namespace, plan: Plan, form: Form) -> dict[str, Any]:
    """What was asked for; no headers, for they may hold keys."""
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "label": options.label,
        "metadata": dict(pair.partition("=")[::2] for pair in options.metadata),
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "model_id": form.model,
        "dataset_name": options.dataset_name,
        "prompt_form": "text" if form.endpoint == CHAT or form.ids is None else "token_ids",
        "num_prompts": len(plan.jobs),
        "num_warmups": len(plan.warmups),
        "loop": plan.loop,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": "inf" if options.burstiness == float("inf") else options.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": options.seed,
        "requested_input_tokens": sum(num_tokens(job.item.prompt) for job in plan.jobs),
        "requested_output_tokens": sum(job.item.output_tokens for job in plan.jobs),
    }


def _cost(outcome: Outcome, duration_s: float) -> dict[str, Any]:
    tokens = sum(r.output_tokens or 0 for r in outcome.records)
    return {
        "client_cpu_s": round(outcome.cpu_s, 4),
        "client_cpu_share": round(outcome.cpu_s / duration_s, 6) if duration_s > 0 else None,  # of one core
        "client_cpu_us_per_token": round(outcome.cpu_s / tokens * 1e6, 2) if tokens else None,
    }
