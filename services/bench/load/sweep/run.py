"""Drives the search against a server: what a probe is, and what its outcome says.

A probe is one request by itself, the reference, and then an open-loop run at the rate, with prompts that no other probe
has sent. It meets the SLO where at least `--slo-share` of its requests keep every bound; failures keep none. It ends
early when that cannot be reached any more. How the reference's time changes over the sweep tells how far the machine's
own speed has drifted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from kvstore.errors import ConfigError
from services.bench.load.http import Clock
from services.bench.load.job import Job
from services.bench.load.plan import TRACE, Plan, make_plan
from services.bench.load.prompts import Segment, num_tokens
from services.bench.load.records import Record
from services.bench.load.run import result_of
from services.bench.load.session import session
from services.bench.load.summary import NO_SUCCESS, Slo
from services.bench.load.sweep.search import Bounds, Phase, Search
from services.bench.load.tenants import Tenants
from services.bench.load.workloads import Item

DRIFT_NOTED = 1.25  # the slowest reference over the fastest
_REFERENCE = 8
"""First number of its segment's key after the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    rate_rps: float
    phase: str
    meets: bool
    at_s: float  # since the sweep began
    seed: int
    num_prompts: int
    goodput_share: float | None  # of the requests that ended; of a run cut short it says little
    is_cut_short: bool
    reference_ms: float | None
    result: dict[str, Any] = field(repr=False)


class Judge:
    """Counts the requests of a probe that miss the SLO."""

    def __init__(self, slo: Slo, num_requests: int, share: float) -> None:
        self._slo = slo
        self._allowed = math.floor(num_requests * (1 - share) + 1e-9)
        self.misses = 0

    def is_lost(self, record: Record) -> bool:
        """Whether the SLO cannot be met any more. A request that was hung up on as planned does not count."""
        self.misses += not record.is_cancelled and not self._slo.is_kept(record)
        return not self.meets

    @property
    def meets(self) -> bool:
        return self.misses <= self._allowed


async def sweep(options: argparse.Namespace, console: Console, clock: Clock = time.monotonic) -> dict[str, Any]:
    """The result of a sweep, with every probe.

    Raises:
        ConfigError: options that do not fit together, or a server that is not there.
    """
    slo = _check(options)
    bounds = Bounds(
        start_rps=options.start_rate,
        min_rps=options.min_rate,
        max_rps=options.max_rate,
        precision=options.precision,
        repeats=options.repeats,
        max_probes=options.max_probes,
    )
    tenants = Tenants.parse(options.tenant, options.tenant_weights)
    search, probes, began_s = Search(bounds), list[Probe](), clock()
    lengths: tuple[int, int] | None = None
    async with session(options, tenants, clock) as server:
        while (rate_rps := search.next_rate()) is not None:
            run = _at_rate(options, rate_rps, options.seed + len(probes))
            plan = make_plan(run, tenants)
            lengths = lengths or _usual(plan)
            reference = await server.ask(Job(-1, _alone(run.seed, lengths), tenant=tenants.first))
            judge = Judge(slo, plan.num_requests, options.slo_share)
            when_s = clock() - began_s
            outcome = await server.run(plan, console, is_quiet=options.disable_tqdm, is_enough=judge.is_lost)
            result = result_of(run, plan, server, outcome, slo)
            probe = Probe(
                rate_rps=rate_rps,
                phase=search.phase.value,
                meets=judge.meets and not outcome.is_interrupted,
                at_s=round(when_s, 3),
                seed=run.seed,
                num_prompts=plan.num_requests,
                goodput_share=result["goodput_share"],
                is_cut_short=outcome.is_cut_short,
                reference_ms=None if not reference.ok or reference.e2el_s is None else reference.e2el_s * 1000,
                result=result,
            )
            probes.append(probe)
            search.tell(probe.meets)
            console.print(_line(probe, search), highlight=False, soft_wrap=True)
            if outcome.is_interrupted:
                break
            await asyncio.sleep(options.settle_s)
        return _result(options, search, probes, {"model_id": server.form.model, "duration": clock() - began_s})


def _check(options: argparse.Namespace) -> Slo:
    slo = Slo.parse(options.goodput)
    if slo is None:
        raise ConfigError("a sweep needs --goodput, for example --goodput ttft:2000 tpot:80")
    if not 0 < options.slo_share <= 1:
        raise ConfigError(f"--slo-share must be above 0 and at most 1, got {options.slo_share:g}")
    if not math.isinf(options.request_rate) or options.ramp_up_strategy is not None:
        raise ConfigError("a sweep sets the rate itself: no --request-rate or --ramp-up-strategy with it")
    if options.dataset_name == TRACE:
        raise ConfigError(f"a sweep changes the rate, and --dataset-name {TRACE} has its own times")
    return slo


def _at_rate(options: argparse.Namespace, rate_rps: float, seed: int) -> argparse.Namespace:
    """The options of one probe."""
    count = max(options.num_prompts or options.min_requests, math.ceil(rate_rps * options.probe_s))
    return argparse.Namespace(**{**vars(options), "request_rate": rate_rps, "num_prompts": count, "seed": seed})


def _usual(plan: Plan) -> tuple[int, int]:
    """Tokens of the middle prompt and the middle answer."""
    items = [job.item for job in plan.jobs]
    prompt = statistics.median_low(num_tokens(item.prompt) for item in items)
    return prompt, statistics.median_low(item.output_tokens for item in items)


def _alone(seed: int, lengths: tuple[int, int]) -> Item:
    """The one request before a probe: as long as all the others before probes, with words of its own."""
    return Item((Segment((seed, _REFERENCE), lengths[0]),), lengths[1])


def _line(probe: Probe, search: Search) -> str:
    share = "no request ended" if probe.goodput_share is None else f"{probe.goodput_share:.0%} good"
    ends = [f"{end:.3g}" if end is not None else "?" for end in (search.low_rps, search.high_rps)]
    verdict = "met" if probe.meets else "not met, cut short" if probe.is_cut_short else "not met"
    return f"{probe.rate_rps:8.3f} requests/s: {share}, {verdict}; now between {ends[0]} and {ends[1]} ({search.phase})"


def _result(
    options: argparse.Namespace, search: Search, probes: Sequence[Probe], known: dict[str, Any]
) -> dict[str, Any]:
    final = [p for p in probes if p.rate_rps == search.low_rps and p.meets]
    references = [p.reference_ms for p in probes if p.reference_ms]
    drift = max(references) / min(references) if references else None
    reasons = _reasons(search, probes)
    return {
        "benchmark": "sweep",
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "label": options.label,
        "metadata": dict(pair.partition("=")[::2] for pair in options.metadata),
        "base_url": options.base_url,
        "model_id": known["model_id"],
        "dataset_name": options.dataset_name,
        "goodput_slo_ms": dict(Slo.parse(options.goodput).bounds_ms),  # type: ignore[union-attr]
        "slo_share": options.slo_share,
        "max_request_rate": search.low_rps,
        "lowest_failing_rate": search.high_rps,
        "request_goodput": _median(final, "request_goodput"),
        "output_throughput": _median(final, "output_throughput"),
        "median_ttft_ms": _median(final, "median_ttft_ms"),
        "median_tpot_ms": _median(final, "median_tpot_ms"),
        "phase": search.phase.value,
        "num_probes": len(probes),
        "reopened": search.reopened,
        "reference_drift": None if drift is None else round(drift, 4),
        "has_drifted": drift is not None and drift > DRIFT_NOTED,
        "duration": round(known["duration"], 3),
        "valid": not reasons,
        "invalid_reasons": reasons,
        "probes": [asdict(p) | {"result": _short(p.result)} for p in probes],
    }


def _reasons(search: Search, probes: Sequence[Probe]) -> list[str]:
    reasons = []
    if search.phase is Phase.SPENT:
        reasons.append(f"--max-probes {len(probes)} were made before both ends held; the machine may be too unsteady")
    elif search.phase is Phase.OUTSIDE:
        end = "--min-rate does not meet" if search.low_rps is None else "--max-rate still meets"
        reasons.append(f"{end} the SLO")
    elif search.phase is not Phase.DONE:
        reasons.append("the sweep was interrupted")
    seen = {reason for p in probes for reason in p.result["invalid_reasons"]}
    for name in sorted(seen - {NO_SUCCESS}):  # that is what a server far beyond its capacity may do
        reasons.append(f"a probe: {name}")
    warm = sum(p.result["warm_cache"] for p in probes)
    return reasons + ([f"{warm} probes found a warm cache; take another --seed"] if warm else [])


def _median(probes: Sequence[Probe], name: str) -> float | None:
    values = [p.result[name] for p in probes if p.result[name] is not None]
    return round(statistics.median(values), 6) if values else None


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """What a plot of probes needs."""
    names = ("completed", "failed", "duration", "request_throughput", "request_goodput", "output_throughput")
    return {
        name: result[name]
        for name in (*names, *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "e2el") for s in ("median", "p99")))
        if name in result
    } | {"invalid_reasons": result["invalid_reasons"]}
