"""Are two sets of runs different, and by how much? B − A with a 95 % interval.

Over runs where there are enough (Welch's t), else over blocks of neighbouring requests of one run each (a moving block
bootstrap: requests that queue together are alike, so single ones are no independent draws).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

MIN_RUNS = 3
RESAMPLES = 4000
RATES = ("request_throughput", "output_throughput", "request_goodput")
LATENCIES = ("ttft", "tpot", "e2el")
STATISTICS: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "median": np.median,
    "p99": lambda values, axis=None: np.percentile(values, 99, axis=axis),
}
CONDITIONS = (
    "dataset_name", "loop", "request_rate", "burstiness", "max_concurrency", "num_prompts", "seed", "prompt_form",
    "requested_input_tokens", "requested_output_tokens", "num_warmups", "endpoint",
)  # fmt: skip
"""Settings that should be equal for a comparison to mean much."""
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t: the 97.5th percentile for 1 to 30 degrees of freedom."""

Run = Mapping[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric in A and in B. ``low`` and ``high`` bound B − A; None where there is not enough to tell."""

    metric: str
    a: float
    b: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """higher | lower | no difference seen | unknown"""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "no difference seen"


@dataclass(frozen=True, slots=True)
class Comparison:
    method: str  # runs | requests
    differences: Sequence[Difference]
    warnings: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        rows = {
            d.metric: {"a": d.a, "b": d.b, "low": d.low, "high": d.high, "verdict": d.verdict} for d in self.differences
        }
        return {"method": self.method, "confidence": 0.95, "warnings": list(self.warnings), "differences": rows}


def read_runs(path: Path) -> list[Run]:
    """The runs of a file: its lines that are JSON objects of a result.

    Raises:
        ConfigError: it holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}") from None
    runs: list[Run] = []
    for line in lines:
        try:
            data = json.loads(line) if line.startswith("{") else None
        except ValueError:
            continue
        if isinstance(data, dict) and "completed" in data:
            runs.append(data)
    if not runs:
        raise ConfigError(f"{path} holds no result of pdray bench")
    return runs


def compare(a: Sequence[Run], b: Sequence[Run], seed: int = 0) -> Comparison:
    """Raises ConfigError where neither enough runs nor requests' rows are there."""
    warnings = _warnings(a, b)
    if min(len(a), len(b)) >= MIN_RUNS:
        names = [*RATES, *(f"{s}_{m}_ms" for m in LATENCIES for s in STATISTICS)]
        return Comparison("runs", [d for name in names if (d := _over_runs(name, a, b)) is not None], warnings)
    if not all(isinstance(run.get("requests"), list) for run in (*a, *b)):
        raise ConfigError(f"give {MIN_RUNS} runs or more in each file, or runs saved with --save-detailed")
    rng = np.random.default_rng(seed)
    found = [_over_requests(m, s, (a, b), rng) for m in LATENCIES for s in STATISTICS]
    rates = [_plain(name, a, b) for name in RATES]
    warnings.append("one run each tells nothing of what changes from run to run; take three or more, A and B in turn")
    return Comparison("requests", [d for d in (*rates, *found) if d is not None], warnings)


def welch(a: Floats, b: Floats) -> tuple[float, float]:
    """The 95 % interval of mean(b) − mean(a); degrees of freedom rounded down, so rather too wide."""
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    centre = float(b.mean() - a.mean())
    if va + vb == 0:
        return centre, centre
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = T_975[min(len(T_975), max(1, int(freedom))) - 1] * math.sqrt(va + vb)
    return centre - half, centre + half


def block_resamples(values: Floats, rng: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """[resamples, n]: each row made of runs of √n neighbours, wrapped around the end."""
    n = len(values)
    length = max(1, round(math.sqrt(n)))
    starts = rng.integers(0, n, size=(resamples, -(-n // length)))
    index = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :n] % n
    return np.asarray(values[index], dtype=np.float64)


def _over_runs(name: str, a: Sequence[Run], b: Sequence[Run]) -> Difference | None:
    values = [np.array([run[name] for run in runs if run.get(name) is not None], dtype=np.float64) for runs in (a, b)]
    if min(len(v) for v in values) < MIN_RUNS:
        return _plain(name, a, b)
    low, high = welch(*values)
    return Difference(name, float(values[0].mean()), float(values[1].mean()), low, high)


def _over_requests(
    metric: str, statistic: str, sides: tuple[Sequence[Run], Sequence[Run]], rng: np.random.Generator
) -> Difference | None:
    key, of = f"{metric}_ms", STATISTICS[statistic]
    values: list[float] = []
    spread: list[Floats] = []
    for runs in sides:
        ended = [r for run in runs for r in run["requests"] if not r["error"] and not r.get("is_cancelled")]
        rows = [row for row in ended if row[key] is not None]
        if not rows:
            return None
        seen = np.array([row[key] for row in rows], dtype=np.float64)
        values.append(float(of(seen)))
        spread.append(of(block_resamples(seen, rng), axis=1))
    low, high = np.percentile(spread[1] - spread[0], (2.5, 97.5))
    return Difference(f"{statistic}_{key}", values[0], values[1], float(low), float(high))


def _plain(name: str, a: Sequence[Run], b: Sequence[Run]) -> Difference | None:
    means = [[run[name] for run in runs if run.get(name) is not None] for runs in (a, b)]
    if not all(means):
        return None
    return Difference(name, float(np.mean(means[0])), float(np.mean(means[1])), None, None)


def _warnings(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    found = []
    for name in CONDITIONS:
        seen = [sorted({str(run.get(name)) for run in runs}) for runs in (a, b)]
        if seen[0] != seen[1]:
            found.append(f"{name} differs: {', '.join(seen[0])} in A, {', '.join(seen[1])} in B")
    for side, runs in (("A", a), ("B", b)):
        invalid = sum(not run.get("valid", True) for run in runs)
        failed = sum(run.get("failed", 0) for run in runs)
        warm = sum(bool(run.get("warm_cache")) for run in runs)
        found += [f"{invalid} runs of {side} are invalid"] if invalid else []
        found += [f"{failed} requests of {side} failed"] if failed else []
        found += [f"{warm} runs of {side} found a warm cache"] if warm else []
    return found
