"""The numbers of a run, from its records: pure, keyed as in the result of `vllm bench serve`.

What cannot be told is None (null in JSON), never 0 and never NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.http import CLIENT_LIMIT
from services.bench.load.records import Record

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
NO_SUCCESS = "no request succeeded"


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds, all of which a good request keeps."""

    bounds_ms: Mapping[str, float]

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Slo | None:
        """``["ttft:2000", "tpot:60"]``; None without any. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for pair in pairs:
            name, _, value = pair.partition(":")
            try:
                bounds[name] = float(value)
            except ValueError:
                bounds[name] = math.nan
            if name not in GOODPUT_METRICS or not bounds[name] > 0:
                raise ConfigError(f"--goodput {pair}: give it as NAME:MILLISECONDS, NAME one of {GOODPUT_METRICS}")
        return cls(bounds) if bounds else None

    def is_kept(self, record: Record) -> bool:
        """A failure keeps no bound. An answer without tokens is judged by its end; one token has no TPOT to judge."""
        seen = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        seen["ttft"] = seen["e2el"] if seen["ttft"] is None else seen["ttft"]
        return record.ok and all((seen[k] or 0.0) * 1000 <= bound for k, bound in self.bounds_ms.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a summary must know of the run beside its records."""

    percentiles: Sequence[float] = (50, 90, 99)
    slo: Slo | None = None
    max_lag_ms: float = 50.0
    loop_lags_s: Sequence[float] = ()
    shared_tokens: Mapping[int, int] = field(default_factory=dict)  # by record index; see prompts.shared_tokens
    slack_tokens: int = 0  # what a template adds in front of every prompt, at most
    is_interrupted: bool = False


def distribution(values_s: Iterable[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std and percentiles in milliseconds; all None without values."""
    values = np.fromiter(values_s, dtype=np.float64) * 1000
    names = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    if not len(values):
        return dict.fromkeys(names)
    found = [values.mean(), np.median(values), values.std(), *(np.percentile(values, p) for p in percentiles)]
    return {name: round(float(value), 4) for name, value in zip(names, found, strict=True)}


def latencies(records: Iterable[Record]) -> dict[str, list[float]]:
    """Seconds of each metric over the successes, in the order of the records; absent ones left out."""
    good = [r for r in records if r.ok]
    return {
        "ttft": [x for r in good if (x := r.ttft_s) is not None],
        "tpot": [x for r in good if (x := r.tpot_s) is not None],
        "itl": [gap for r in good for gap in r.gaps_s],
        "e2el": [x for r in good if (x := r.e2el_s) is not None],
        "service_ttft": [x for r in good if (x := r.service_ttft_s) is not None],
        "service_e2el": [x for r in good if (x := r.service_e2el_s) is not None],
    }


def summarize(records: Sequence[Record], conditions: Conditions) -> dict[str, Any]:
    """The result of a run: counts, rates, latencies, and whether it may be believed."""
    good = [r for r in records if r.ok]
    duration_s = max((r.done_s for r in records), default=0.0) - min((r.due_s for r in records), default=0.0)
    tokens = _tokens(good)
    result: dict[str, Any] = {
        "duration": round(duration_s, 6),
        "completed": len(good),
        "failed": sum(bool(r.error) for r in records),
        "cancelled": sum(r.is_cancelled for r in records),
        "errors": dict(Counter(r.error_kind for r in records if r.error)),
        **tokens,
        "request_throughput": _rate(len(good), duration_s),
        "request_goodput": None,
        "output_throughput": _rate(tokens["total_output_tokens"], duration_s),
        "total_token_throughput": _rate(tokens["total_input_tokens"] + tokens["total_output_tokens"], duration_s),
    }
    if conditions.slo is not None:
        kept = sum(conditions.slo.is_kept(r) for r in records)
        judged = sum(not r.is_cancelled for r in records)
        result["request_goodput"] = _rate(kept, duration_s)
        result["goodput_share"] = round(kept / judged, 6) if judged else None
        result["goodput_slo_ms"] = dict(conditions.slo.bounds_ms)
    for name, values in latencies(records).items():
        for key, value in distribution(values, conditions.percentiles).items():
            result[f"{key}_{name}_ms"] = value
    chunks = sum(r.chunks for r in good)
    result["tokens_per_chunk"] = round(tokens["total_output_tokens"] / chunks, 3) if chunks else None
    if tenants := sorted({r.tenant for r in records} - {""}):
        result["tenants"] = {name: _tenant([r for r in records if r.tenant == name], conditions) for name in tenants}
    result |= _client(records, conditions)
    result |= _cache(good, conditions)
    result["invalid_reasons"] = _invalid(result, good, conditions)
    result["valid"] = not result["invalid_reasons"]
    return result


def _tenant(records: Sequence[Record], conditions: Conditions) -> dict[str, Any]:
    """One tenant's part of a run: what tells whether it got its share."""
    good = [r for r in records if r.ok]
    of_each = latencies(good)
    return {
        "completed": len(good),
        "failed": sum(bool(r.error) for r in records),
        **_tokens(good),
        "good_requests": None if conditions.slo is None else sum(conditions.slo.is_kept(r) for r in records),
        **{
            f"{key}_{name}_ms": value
            for name in GOODPUT_METRICS
            for key, value in distribution(of_each[name], conditions.percentiles).items()
        },
    }


def _tokens(good: Sequence[Record]) -> dict[str, int]:
    return {
        "total_input_tokens": sum(r.input_tokens or 0 for r in good),
        "total_output_tokens": sum(r.output_tokens or 0 for r in good),
    }


def _rate(count: float, duration_s: float) -> float | None:
    return round(count / duration_s, 6) if duration_s > 0 else None


def _client(records: Sequence[Record], conditions: Conditions) -> dict[str, Any]:
    sends = distribution([r.lag_s for r in records if r.lag_s is not None], (99,))
    loop = distribution(conditions.loop_lags_s, (99,))
    return {
        "p99_client_lag_ms": sends["p99"],
        "max_client_lag_ms": max((round(r.lag_s * 1000, 4) for r in records if r.lag_s is not None), default=None),
        "p99_client_loop_lag_ms": loop["p99"],
    }


def _cache(good: Sequence[Record], conditions: Conditions) -> dict[str, Any]:
    told = [r for r in good if r.cached_tokens is not None and r.input_tokens]
    prompt = sum(r.input_tokens or 0 for r in told)
    cached = sum(r.cached_tokens or 0 for r in told)
    shared = conditions.shared_tokens
    foreign = sum(
        max(0, (r.cached_tokens or 0) - shared[r.index] - conditions.slack_tokens) for r in told if r.index in shared
    )
    return {
        "total_cached_tokens": cached if told else None,
        "cache_hit_rate": round(cached / prompt, 6) if prompt else None,
        "shared_prompt_rate": round(sum(shared.get(r.index, 0) for r in told) / prompt, 6) if prompt else None,
        "warm_cache_tokens": foreign if told else None,
        "warm_cache": bool(prompt and foreign > 0.01 * prompt),
    }


def _invalid(result: Mapping[str, Any], good: Sequence[Record], conditions: Conditions) -> list[str]:
    reasons = []
    if conditions.is_interrupted:
        reasons.append("the run was interrupted")
    if not good:
        reasons.append(NO_SUCCESS)
    for key, what in (("p99_client_lag_ms", "sent requests"), ("p99_client_loop_lag_ms", "read answers")):
        lag_ms = result[key]
        if lag_ms is not None and lag_ms > conditions.max_lag_ms:
            reasons.append(
                f"the client {what} late: p99 {lag_ms:.1f} ms, over --max-client-lag-ms {conditions.max_lag_ms:g}"
            )
    if own := result["errors"].get(CLIENT_LIMIT):
        reasons.append(f"{own} requests failed for want of sockets in the client; see `ulimit -n`")
    silent = sum(r.output_tokens is None for r in good)
    if silent:
        reasons.append(f"{silent} answers had no usage: their tokens are unknown and not counted")
    return reasons
