"""When requests are due: pure functions from unit gaps to offsets in seconds; the first request is due at 0.

unit_gaps (mean 1) ─► cumulated ─► steady: divided by the rate | ramp: through the inverse of the expected count
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

Floats = NDArray[np.float64]
LINEAR, EXPONENTIAL = "linear", "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A rate that moves from ``start_rps`` to ``end_rps`` over the run and then stays."""

    strategy: str  # linear | exponential
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in (LINEAR, EXPONENTIAL):
            raise ConfigError(f"--ramp-up-strategy must be linear or exponential, got {self.strategy}")
        if not (0 < self.start_rps < math.inf and 0 < self.end_rps < math.inf):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0 and finite")

    def duration_s(self, count: int) -> float:
        """Seconds in which ``count`` requests are expected."""
        a, b = self.start_rps, self.end_rps
        if a == b:
            return count / a
        return 2 * count / (a + b) if self.strategy == LINEAR else count * math.log(b / a) / (b - a)

    def expected(self, at_s: Floats, count: int) -> Floats:
        """Requests expected until each moment: the integral of the rate."""
        a, b, total_s = self.start_rps, self.end_rps, self.duration_s(count)
        inside = np.minimum(at_s, total_s)
        if a == b:
            return a * at_s
        if self.strategy == LINEAR:
            grown = a * inside + (b - a) / (2 * total_s) * inside**2
        else:
            growth = math.log(b / a) / total_s
            grown = a / growth * np.expm1(growth * inside)
        return np.asarray(grown + b * (at_s - inside), dtype=np.float64)

    def moments(self, units: Floats, count: int) -> Floats:
        """The inverse of `expected`: when each number of requests is reached."""
        a, b, total_s = self.start_rps, self.end_rps, self.duration_s(count)
        if a == b:
            return units / a
        inside = np.minimum(units, count)
        if self.strategy == LINEAR:
            slope = (b - a) / total_s
            at_s = 2 * inside / (a + np.sqrt(np.maximum(0.0, a * a + 2 * slope * inside)))
        else:
            growth = math.log(b / a) / total_s
            at_s = np.log1p(growth * inside / a) / growth
        return np.asarray(at_s + (units - inside) / b, dtype=np.float64)


def unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> Floats:
    """``count`` gaps of mean 1 from a gamma distribution of that shape.

    1 is a Poisson process, below it requests come in bursts, above it more evenly; infinity is a constant gap.
    """
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, got {burstiness}")
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(burstiness, 1.0 / burstiness, size=count)


def steady(gaps: Floats, rate_rps: float) -> Floats:
    """Offsets at a fixed rate; all 0 at an infinite one."""
    if not rate_rps > 0:
        raise ConfigError(f"--request-rate must be above 0, got {rate_rps}")
    return _units(gaps) / rate_rps


def ramped(gaps: Floats, ramp: Ramp) -> Floats:
    """Offsets of a process whose rate follows the ramp."""
    return ramp.moments(_units(gaps), len(gaps))


def _units(gaps: Floats) -> Floats:
    """The gaps summed up, from 0: the last gap stands after the last request and is not used."""
    return np.concatenate([[0.0], np.cumsum(gaps[:-1])]) if len(gaps) else np.zeros(0)
