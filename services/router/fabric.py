"""How fast KV moves from one worker to another, measured from hand-offs and pulls that were reported."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from services.router.loads import LoadCost, LoadMeter
from services.router.policy_types import Fabric

DEFAULT_BYTES_PER_S = 1e9
"""Assumed until anything has been measured: loopback and ten-gigabit links are about there."""
FEW_WAYS = 4
"""From so many measured ways on, their median is assumed of the others."""
PROBE = 2.0
"""Before that: a hand-off that hid behind the computing shows the least speed of its wire, and this often that is
tried, since what is thought slow is never used, and so never measured."""
BOUND_MS = 10.0
"""A hand-off that took this long beyond the computing was bound by the wire, so it measures it."""
BOUND_SHARE = 1 / 16
"""And so much of the computing more: the last layer moves after it however fast the wire is, and of a long prompt that
alone takes a while. Taken as the wire's speed it would be the computing's."""
MIN_BYTES = 1 << 20
"""Smaller hand-offs measure the round trips, not the wire."""
PULL_SETUP_MS = 10.0
"""Assumed of loading KV from another worker, beyond its bytes: two calls, a pin, and the digests."""
EWMA_WEIGHT = 0.3
FORGET_S = 30.0
"""A pair that measured slow is tried again after this, else it would never be measured anew."""
MAX_FORGET_S = 16 * FORGET_S
"""One that was slow again and again is tried ever more rarely, down to this."""
SWEEP_S = 1.0
"""How often old measurements are looked for and the median is taken."""

Way = tuple[str, str]
"""Who writes and who reads, by worker id."""


@dataclass(slots=True)
class _Seen:
    """What is known of one way."""

    bytes_per_s: float
    at_s: float
    keep_s: float = FORGET_S


class FabricMeter:
    """Moving means by (writer, reader) worker id. With ``pulls`` the policy may load KV from other workers."""

    def __init__(self, clock: Callable[[], float], *, pulls: bool = True) -> None:
        self._clock = clock
        self._pulls = pulls
        self._seen: dict[Way, _Seen] = {}
        self._keep_s: dict[Way, float] = {}  # of ways that were slow, how long that was last believed
        self._meters: dict[Way, LoadMeter] = {}
        self._loads: dict[Way, LoadCost] = {}
        self._rates: dict[Way, float] = {}  # of `_seen`, as the policy reads it
        self._usual = 0.0  # median of the rates
        self._fastest = 0.0  # of all that was measured or learned
        self._swept_s = -SWEEP_S
        self._floor = 0.0  # bytes per second, the most that a hidden hand-off has shown

    def observe(self, pair: Way, num_bytes: int, compute_ms: float, exposed_ms: float) -> None:
        """One hand-off: bytes that moved while token 1 was computed, and in the time exposed after it."""
        seconds = (compute_ms + exposed_ms) / 1000
        if num_bytes < MIN_BYTES or seconds <= 0:
            return
        rate = num_bytes / seconds
        known = self._seen.get(pair)
        if exposed_ms >= BOUND_MS + BOUND_SHARE * compute_ms:
            self._see(pair, known.bytes_per_s + EWMA_WEIGHT * (rate - known.bytes_per_s) if known else rate)
        else:
            self._floor = max(self._floor, rate)
            if known is not None and rate > known.bytes_per_s:
                self._see(pair, rate)

    def observe_pull(self, way: Way, num_bytes: int, wire_ms: float) -> None:
        """KV that came from a holder to a reader; no bytes: it did not come in time, so it is not asked for a while."""
        if not num_bytes:
            self._forget_load(way)
            self._see(way, 0.0)
        elif num_bytes >= MIN_BYTES and wire_ms > 0:
            meter = self._meters.get(way)
            if meter is None:
                assumed = LoadCost(setup_ms=PULL_SETUP_MS, bytes_per_s=max(self._assumed(), 1.0))
                meter = self._meters[way] = LoadMeter(assumed)
            meter.observe(num_bytes, 0, PULL_SETUP_MS + wire_ms)  # the wire's time is all that is reported
            self._loads[way] = meter.cost()
            self._fastest = max(self._fastest, self._loads[way].bytes_per_s)
            rate, known = 1000 * num_bytes / wire_ms, self._seen.get(way)
            self._see(way, known.bytes_per_s + EWMA_WEIGHT * (rate - known.bytes_per_s) if known else rate)

    def now(self) -> Fabric:
        """What the policy uses, to be read before the next call of any method. Old measurements are dropped."""
        if self._clock() - self._swept_s >= SWEEP_S:
            self._sweep()
        assumed = self._assumed()
        return Fabric(
            default_bytes_per_s=assumed,
            measured=self._rates,
            pull_setup_ms=PULL_SETUP_MS if self._pulls else None,
            loads=self._loads,
            fastest_bytes_per_s=max(self._fastest, assumed, 1.0),
        )

    def _sweep(self) -> None:
        now = self._swept_s = self._clock()
        for way in [w for w, seen in self._seen.items() if now - seen.at_s > seen.keep_s]:
            del self._seen[way], self._rates[way]
            self._forget_load(way)
        rates = [rate for rate in self._rates.values() if rate > 0]
        self._fastest = max([0.0, *rates, *(cost.bytes_per_s for cost in self._loads.values())])
        self._usual = statistics.median(rates) if len(rates) >= FEW_WAYS else 0.0

    def _see(self, way: Way, bytes_per_s: float) -> None:
        """A way that is slow each time it is tried is believed to be so for twice as long."""
        known = self._seen.get(way)
        if bytes_per_s >= self._assumed() / 2:
            self._keep_s.pop(way, None)
            keep_s = FORGET_S
        elif known is None:
            keep_s = self._keep_s[way] = min(2 * self._keep_s.get(way, FORGET_S / 2), MAX_FORGET_S)
        else:
            keep_s = known.keep_s
        self._seen[way] = _Seen(bytes_per_s, self._clock(), keep_s)
        self._rates[way] = bytes_per_s
        self._fastest = max(self._fastest, bytes_per_s)

    def _assumed(self) -> float:
        """Of a way that has not been measured."""
        return self._usual or max(DEFAULT_BYTES_PER_S, PROBE * self._floor)

    def _forget_load(self, way: Way) -> None:
        self._meters.pop(way, None)
        self._loads.pop(way, None)
