"""What rounds of both sides say about an expectation: pure.

A round measures both sides one after the other, so the machine's drift from round to round is common to both; what
counts is the ratio within each round. Its 95 % interval is Student's t over the logarithms. Source: `compare.T_975`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from services.bench.load.compare import T_975
from services.bench.scenarios.scenario import HIGHER, LOWER, NOT_HIGHER, NOT_LOWER, Expectation

HOLDS, OPPOSITE, OPEN, UNKNOWN = "holds", "does not hold", "not shown", "no figures"
MIN_ROUNDS = 3
MARGIN = math.log(1.1)  # what counts as no worse


@dataclass(frozen=True, slots=True)
class Finding:
    """``change``: candidate over baseline minus one, with its interval; None where it cannot be told."""

    case: str
    metric: str
    expected: str
    baseline: float | None  # medians over the rounds
    candidate: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: str


def judge(case: str, expectation: Expectation, rounds: Sequence[tuple[float | None, float | None]]) -> Finding:
    """``rounds``: (baseline, candidate) of each round; one where either has no figure is left out."""
    pairs = [(a, b) for a, b in rounds if a is not None and b is not None]
    interval = _interval(pairs)
    change, low, high = (None if x is None else math.expm1(x) for x in interval)
    return Finding(
        case=case,
        metric=expectation.metric,
        expected=expectation.be,
        baseline=statistics.median(a for a, _ in pairs) if pairs else None,
        candidate=statistics.median(b for _, b in pairs) if pairs else None,
        change=change,
        low=low,
        high=high,
        verdict=_verdict(expectation.be, pairs, *interval[1:]),
    )


def _interval(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None, float | None]:
    """Mean and bounds of the logarithm of candidate over baseline."""
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        return None, None, None
    logs = [math.log(b / a) for a, b in pairs]
    centre = statistics.fmean(logs)
    if len(logs) < MIN_ROUNDS:
        return centre, None, None
    half = T_975[min(len(T_975), len(logs) - 1) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return centre, centre - half, centre + half


def _verdict(expected: str, pairs: Sequence[tuple[float, float]], low: float | None, high: float | None) -> str:
    if not pairs:
        return UNKNOWN
    if low is None or high is None:
        return _by_order(expected, pairs)
    if expected in (LOWER, NOT_HIGHER):
        low, high = -high, -low
    if low > (-MARGIN if expected in (NOT_LOWER, NOT_HIGHER) else 0):
        return HOLDS
    return OPPOSITE if high < 0 else OPEN


def _by_order(expected: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Where there is no ratio, a figure being 0: only what every one of enough rounds says counts."""
    if len(pairs) < MIN_ROUNDS:
        return OPEN
    signs = {(b > a) - (b < a) for a, b in pairs}
    wanted = 1 if expected in (HIGHER, NOT_LOWER) else -1
    if signs == {wanted} or (expected in (NOT_LOWER, NOT_HIGHER) and -wanted not in signs):
        return HOLDS
    return OPPOSITE if signs == {-wanted} else OPEN
