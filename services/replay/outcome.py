"""What a replay comes to: hits, latencies, goodput against targets, and balance, as numbers, a table and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from services.replay.record import Record, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """A request is good if its first token came in time and the mean gap between its tokens is small enough."""

    ttft_ms: float = 2000.0
    ttft_token_ms: float = 0.2  # more for each prompt token: a long prompt may take longer
    tpot_ms: float = 60.0

    def is_met(self, record: Record) -> bool:
        allowed_ms = self.ttft_ms + self.ttft_token_ms * record.arrival.num_tokens
        return record.end_s >= 0 and record.ttft_ms <= allowed_ms and record.tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one replay."""

    policy: str
    requests: int
    finished: int
    duration_s: float  # of the arrivals
    request_rate: float
    good: int
    goodput: float  # good requests per second of arrivals
    hit_rate: float  # prompt tokens that were not computed
    cached_rate: float  # of them those that the prefill worker had itself; the rest was loaded from other workers
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    prefill_balance: float  # computed tokens of the busiest worker over the mean
    decode_balance: float  # output tokens likewise

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0


def outcome(records: Sequence[Record], setting: Setting, targets: Targets) -> Outcome:
    """Figures of a finished replay."""
    done = [r for r in records if r.end_s >= 0]
    span_s = max((r.arrival.at_s for r in records), default=0.0) - min((r.arrival.at_s for r in records), default=0.0)
    prompt = sum(r.arrival.num_tokens for r in done)
    cached = sum(r.cached_tokens for r in done)
    loaded = sum(r.loaded_tokens for r in done)
    good = sum(targets.is_met(r) for r in done)
    computed: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for r in done:
        computed[r.pair[0]] += r.arrival.num_tokens - r.cached_tokens - r.loaded_tokens
        made[r.pair[1]] += r.arrival.output_tokens
    return Outcome(
        policy=setting.policy,
        requests=len(records),
        finished=len(done),
        duration_s=round(span_s, 3),
        request_rate=round(len(records) / span_s, 4) if span_s else 0.0,
        good=good,
        goodput=round(good / span_s, 4) if span_s else 0.0,
        hit_rate=round((cached + loaded) / prompt, 4) if prompt else 0.0,
        cached_rate=round(cached / prompt, 4) if prompt else 0.0,
        ttft_ms=percentiles([r.ttft_ms for r in done]),
        tpot_ms=percentiles([r.tpot_ms for r in done if r.arrival.output_tokens > 1]),
        prefill_balance=balance(computed, setting.prefill),
        decode_balance=balance(made, setting.decode),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest values that so many are not above: p50, p90, p99."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    return {f"p{p}": round(ordered[math.ceil(p / 100 * len(ordered)) - 1], 3) for p in (50, 90, 99)}


def balance(work: Counter[str], workers: int) -> float:
    """Largest share over the mean of all workers; 1 is even."""
    return round(max(work.values()) * workers / sum(work.values()), 4) if sum(work.values()) else 1.0


def as_dict(found: Outcome) -> dict[str, Any]:
    """For one JSON line."""
    return asdict(found) | {"good_share": round(found.good_share, 4)}


def as_table(found: Sequence[Outcome]) -> Table:
    """One row for each policy."""
    columns = (
        "policy",
        "requests",
        "good",
        "goodput /s",
        "hit",
        "TTFT p50",
        "p90",
        "p99 ms",
        "TPOT p50",
        "p90",
        "p99 ms",
    )
    table = Table(*columns, "balance P", "D")
    for o in found:
        ttft = (f"{o.ttft_ms[p]:.0f}" for p in ("p50", "p90", "p99"))
        tpot = (f"{o.tpot_ms[p]:.1f}" for p in ("p50", "p90", "p99"))
        shares = f"{100 * o.good_share:.1f} %", f"{o.goodput:.2f}", f"{100 * o.hit_rate:.1f} %"
        table.add_row(
            o.policy, str(o.requests), *shares, *ttft, *tpot, f"{o.prefill_balance:.2f}", f"{o.decode_balance:.2f}"
        )
    return table
