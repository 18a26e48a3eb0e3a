"""Bisection for the highest rate that meets an SLO, on a server whose answers are noisy and whose speed may drift.

    EXPAND ─ a rate that meets and a higher one that does not ─► BISECT ─ close enough ─► CONFIRM ─ both hold ─► DONE
       ▲                                                                                  │
       └───────────────────────── one of them does not hold any more ────────────────────┘

On the way each rate is asked once. CONFIRM asks both ends afresh, in turn, until each has a majority; so what was found
half an hour ago counts only if it still holds. An end that does not hold reopens the search around it; each time the
steps outwards grow and the ends may lie further apart: an unsteady machine gets a wider answer, not an endless search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import ConfigError


class Phase(StrEnum):
    EXPAND = "expand"
    BISECT = "bisect"
    CONFIRM = "confirm"
    DONE = "done"  # both ends hold
    SPENT = "spent"  # max_probes were made before that
    OUTSIDE = "outside"  # even the lowest rate fails, or even the highest meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where and how closely is searched."""

    start_rps: float = 1.0
    min_rps: float = 0.01
    max_rps: float = 10000.0
    precision: float = 0.05  # the ends differ by this part at most, where none was reopened
    repeats: int = 3  # confirmations of each end, of which a majority decides
    max_probes: int = 40

    def __post_init__(self) -> None:
        if not 0 < self.min_rps <= self.start_rps <= self.max_rps < math.inf:
            raise ConfigError(
                f"--min-rate {self.min_rps:g}, --start-rate {self.start_rps:g} and --max-rate {self.max_rps:g} must "
                "be above 0 and in this order"
            )
        if not 0 < self.precision < 1:
            raise ConfigError(f"--precision must be above 0 and below 1, got {self.precision:g}")
        if self.repeats < 1 or self.repeats % 2 == 0:
            raise ConfigError(f"--repeats must be odd, so that there is a majority; got {self.repeats}")


class Search:
    """Ask `next_rate`, run it, `tell`; until `next_rate` is None."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.low_rps: float | None = None  # highest rate that meets, as far as is known
        self.high_rps: float | None = None  # lowest rate that does not
        self.phase = Phase.EXPAND
        self.probes = 0
        self.reopened = 0
        self._next_rps = bounds.start_rps
        self._votes: dict[float, list[bool]] = {}  # of the ends, since they were found
        self._step = 2.0

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.SPENT, Phase.OUTSIDE)

    @property
    def precision(self) -> float:
        """Part by which the ends may differ now."""
        return self._bounds.precision * (1 + self.reopened / 2)

    def next_rate(self) -> float | None:
        return None if self.is_over else self._next_rps

    def tell(self, meets: bool) -> None:
        """What the rate of `next_rate` has shown."""
        assert not self.is_over
        self.probes += 1
        if self.phase is Phase.CONFIRM:
            self._votes[self._next_rps].append(meets)
            self._confirm()
        else:
            if meets:
                self.low_rps = self._next_rps
            else:
                self.high_rps = self._next_rps
            self._narrow()
        if not self.is_over and self.probes >= self._bounds.max_probes:
            self.phase = Phase.SPENT

    def _narrow(self) -> None:
        """The next rate from the ends that are known: outwards where one is missing, else between them."""
        low, high, bounds = self.low_rps, self.high_rps, self._bounds
        if low is None or high is None:
            self.phase = Phase.EXPAND
            known = high if low is None else low
            assert known is not None
            if known in (bounds.min_rps, bounds.max_rps) and (known == bounds.min_rps) == (low is None):
                self.phase = Phase.OUTSIDE
                return
            wanted = known / self._step if low is None else known * self._step
            self._next_rps = min(bounds.max_rps, max(bounds.min_rps, wanted))
        elif high / low > 1 + self.precision:
            self.phase = Phase.BISECT
            self._next_rps = math.sqrt(low * high)
        else:
            self.phase = Phase.CONFIRM
            self._votes = {low: [], high: []}
            self._next_rps = low

    def _confirm(self) -> None:
        assert self.low_rps is not None
        assert self.high_rps is not None
        low, high = self._verdict(self.low_rps), self._verdict(self.high_rps)
        if low is False:
            self._reopen(low_rps=None, high_rps=self.low_rps)
        elif high is True:
            self._reopen(low_rps=self.high_rps, high_rps=None)
        elif low and high is False:
            self.phase = Phase.DONE
        else:
            open_ends = [rate for rate in self._votes if self._verdict(rate) is None]
            self._next_rps = min(open_ends, key=lambda rate: len(self._votes[rate]))

    def _verdict(self, rate_rps: float) -> bool | None:
        """What the majority of the confirmations says; None while that is open."""
        votes, needed = self._votes[rate_rps], self._bounds.repeats // 2 + 1
        if votes.count(True) >= needed:
            return True
        return False if votes.count(False) >= needed else None

    def _reopen(self, low_rps: float | None, high_rps: float | None) -> None:
        self.reopened += 1
        self._step = min(2.0, (1 + self._bounds.precision) ** (2 * self.reopened))
        self.low_rps, self.high_rps = low_rps, high_rps
        self._narrow()
