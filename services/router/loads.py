"""What loading KV costs, instead of computing it again: learned from loads that were seen.

    load_ms(ranges, bytes) = set-up + ranges × per range + bytes / bandwidth

A *range* is a piece of memory that lies together: one layer of neighbouring blocks. Each costs a call, so a source
with much bandwidth may still be slow for a few blocks of many layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.9
"""Weight of what was known at each new load: the last ten or so count."""
PRIOR_WEIGHT = 0.05
"""How much the assumed cost weighs at first, in loads. It is forgotten, too, but for `LEAST_PRIOR_WEIGHT`."""
LEAST_PRIOR_WEIGHT = 1e-6
LEAST_TERMS = (0.1, 1e-4, 1e-9)
"""Smallest set-up (ms), cost of a range (ms) and of a byte (ms) that are told from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """Of one source or way."""

    setup_ms: float = 0.0
    range_ms: float = 0.0
    bytes_per_s: float = 1e9  # 0: nothing is ever loaded

    def ms(self, num_bytes: int, ranges: int = 0) -> float:
        """Predicted time to load so much; infinite where nothing moves."""
        if self.bytes_per_s <= 0:
            return float("inf")
        return self.setup_ms + ranges * self.range_ms + 1000 * num_bytes / self.bytes_per_s


class LoadMeter:
    """Learns a `LoadCost` from the loads of one source or way: least squares with forgetting, around an assumed cost.

    Terms that loads say nothing about stay as assumed: where all loads have the same number of ranges, ranges and
    set-up cannot be told apart, and their sum is right all the same. No term falls below 0.
    """

    def __init__(self, assumed: LoadCost) -> None:
        if assumed.bytes_per_s <= 0:
            raise ValueError(f"the assumed bandwidth must be positive, got {assumed.bytes_per_s}")
        terms = (assumed.setup_ms, assumed.range_ms, 1000 / assumed.bytes_per_s)
        self._units = tuple(max(term, least) for term, least in zip(terms, LEAST_TERMS, strict=True))
        self._square = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._prior_weight = PRIOR_WEIGHT
        self._assumed = [term / unit for term, unit in zip(terms, self._units, strict=True)]

    def observe(self, num_bytes: int, ranges: int, took_ms: float) -> None:
        """One load that was seen to its end."""
        if num_bytes <= 0 or ranges < 0 or took_ms < 0:
            raise ValueError(f"a load has bytes and takes time, got {num_bytes} bytes, {ranges} ranges, {took_ms} ms")
        terms = [unit * n for unit, n in zip(self._units, (1, ranges, num_bytes), strict=True)]
        expected_ms = sum(terms)
        row = [term / expected_ms for term in terms]  # small loads weigh like large ones
        for i in range(3):
            self._square[i] = [FORGET * a + row[i] * b for a, b in zip(self._square[i], row, strict=True)]
            self._right[i] = FORGET * self._right[i] + row[i] * took_ms / expected_ms
        self._prior_weight = max(FORGET * self._prior_weight, LEAST_PRIOR_WEIGHT)

    def cost(self) -> LoadCost:
        """What is known now."""
        free = [0, 1, 2]
        while True:  # a term below 0 is held at 0, and the others are fitted again
            found = self._fit(free)
            below = [i for i in free if found[i] < 0]
            if not below:
                break
            free.remove(min(below, key=lambda i: found[i]))
        setup_ms, range_ms, byte_ms = (f * unit for f, unit in zip(found, self._units, strict=True))
        return LoadCost(setup_ms=setup_ms, range_ms=range_ms, bytes_per_s=1000 / max(byte_ms, 1e-15))

    def _fit(self, free: Sequence[int]) -> list[float]:
        """Multiples of the units; 0 for those that are not free."""
        weight = self._prior_weight
        square = [[self._square[i][j] + weight * (i == j) for j in free] for i in free]
        right = [self._right[i] + weight * self._assumed[i] for i in free]
        found = [0.0] * 3
        for i, value in zip(free, _solved(square, right), strict=True):
            found[i] = value
        return found


def _solved(square: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination; the matrix is positive definite, so no pivot is 0."""
    n = len(right)
    for i in range(n):
        for j in range(i + 1, n):
            factor = square[j][i] / square[i][i]
            square[j] = [a - factor * b for a, b in zip(square[j], square[i], strict=True)]
            right[j] -= factor * right[i]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (right[i] - sum(square[i][j] * found[j] for j in range(i + 1, n))) / square[i][i]
    return found
