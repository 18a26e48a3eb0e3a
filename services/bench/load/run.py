"""One run, from options to its result.

plan ─► session: server, warm-ups, drive ─► summary ─► phases of a pdray
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from services.bench.load.client import CHAT, Form
from services.bench.load.http import Clock
from services.bench.load.plan import Plan, make_plan
from services.bench.load.records import Record
from services.bench.load.server import server_phases
from services.bench.load.session import Outcome, Session, session, shared_by_turns
from services.bench.load.summary import Conditions, Slo, summarize
from services.bench.load.tenants import Tenants

TEMPLATE_TOKENS = 256  # what a server may put before every prompt that is text


async def bench(
    options: argparse.Namespace, console: Console, clock: Clock = time.monotonic
) -> tuple[dict[str, Any], Sequence[Record]]:
    """The result, with the keys of `summary`, and the records behind it.

    Raises:
        ConfigError: options that do not fit together, or a server that is not there.
    """
    tenants = Tenants.parse(options.tenant, options.tenant_weights)
    slo, plan = Slo.parse(options.goodput), make_plan(options, tenants)
    async with session(options, tenants, clock) as server:
        outcome = await server.run(plan, console, is_quiet=options.disable_tqdm)
        result = result_of(options, plan, server, outcome, slo)
        if server.server.is_pdray and not outcome.is_interrupted:
            ids = [r.answer_id for r in outcome.records if r.ok]
            result["server_phases"] = await server_phases(server.pool, ids)
        return result, outcome.records


def result_of(
    options: argparse.Namespace, plan: Plan, server: Session, outcome: Outcome, slo: Slo | None
) -> dict[str, Any]:
    """What was asked for, and what came of it."""
    conditions = Conditions(
        percentiles=options.metric_percentiles,
        slo=slo,
        max_lag_ms=options.max_client_lag_ms,
        loop_lags_s=outcome.loop_lags_s,
        shared_tokens=shared_by_turns(plan, outcome.records),
        slack_tokens=TEMPLATE_TOKENS if server.form.ids is None else 0,
        is_interrupted=outcome.is_interrupted,
    )
    result = {**_settings(options, plan, server.form), **summarize(outcome.records, conditions)}
    return result | _cost(outcome, result["duration"])


def _settings(options: argparse.Namespace, plan: Plan, form: Form) -> dict[str, Any]:
    """What was asked for; no headers and no keys."""
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "label": getattr(options, "label", ""),
        "metadata": dict(pair.partition("=")[::2] for pair in getattr(options, "metadata", ())),
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "model_id": form.model,
        "dataset_name": options.dataset_name,
        "prompt_form": "text" if form.endpoint == CHAT or form.ids is None else "token_ids",
        "num_prompts": plan.num_requests,
        "num_warmups": len(plan.warmups),
        "loop": plan.loop,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": "inf" if options.burstiness == float("inf") else options.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": options.seed,
        "requested_input_tokens": plan.input_tokens,
        "requested_output_tokens": plan.output_tokens,
        "num_pictures": plan.num_pictures,
    }


def _cost(outcome: Outcome, duration_s: float) -> dict[str, Any]:
    tokens = sum(r.output_tokens or 0 for r in outcome.records)
    return {
        "client_cpu_s": round(outcome.cpu_s, 4),
        "client_cpu_share": round(outcome.cpu_s / duration_s, 6) if duration_s > 0 else None,  # of one core
        "client_cpu_us_per_token": round(outcome.cpu_s / tokens * 1e6, 2) if tokens else None,
    }
