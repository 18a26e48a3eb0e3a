"""How fast KV moves from one worker to another, measured from hand-offs and pulls that were reported."""

from __future__ import annotations

from collections.abc import Callable

from services.router.policy import Fabric

DEFAULT_BYTES_PER_S = 1e9
"""Assumed until a pair has been measured: loopback and ten-gigabit links are about there."""
BOUND_MS = 10.0
"""A hand-off that took this long beyond the computing was bound by the wire, so it measures it."""
MIN_BYTES = 1 << 20
"""Smaller hand-offs measure the round trips, not the wire."""
PULL_SETUP_MS = 10.0
"""Assumed of loading KV from another worker, beyond its bytes: two calls, a pin, and the digests."""
EWMA_WEIGHT = 0.3
FORGET_S = 30.0
"""A pair that measured slow is tried again after this, else it would never be measured anew."""


class FabricMeter:
    """Moving means by (writer, reader) worker id. With ``pulls`` the policy may load KV from other workers."""

    def __init__(self, clock: Callable[[], float], *, pulls: bool = True) -> None:
        self._clock = clock
        self._pulls = pulls
        self._measured: dict[tuple[str, str], tuple[float, float]] = {}  # bytes per second, when

    def observe(self, pair: tuple[str, str], num_bytes: int, compute_ms: float, exposed_ms: float) -> None:
        """One hand-off: bytes that moved while token 1 was computed, and in the time exposed after it."""
        seconds = (compute_ms + exposed_ms) / 1000
        if num_bytes < MIN_BYTES or seconds <= 0:
            return
        now, seen = self._clock(), num_bytes / seconds
        known = self._measured.get(pair)
        if exposed_ms >= BOUND_MS:
            before = known[0] if known else seen
            self._measured[pair] = (before + EWMA_WEIGHT * (seen - before), now)
        elif known is not None and seen > known[0]:
            self._measured[pair] = (seen, now)

    def observe_pull(self, way: tuple[str, str], num_bytes: int, wire_ms: float) -> None:
        """KV that came from a holder to a reader; no bytes: it did not come in time, so it is not asked for a while."""
        now = self._clock()
        if not num_bytes:
            self._measured[way] = (0.0, now)
        elif num_bytes >= MIN_BYTES and wire_ms > 0:
            seen = 1000 * num_bytes / wire_ms
            before = known[0] if (known := self._measured.get(way)) else seen
            self._measured[way] = (before + EWMA_WEIGHT * (seen - before), now)

    def now(self) -> Fabric:
        """What the policy uses; measurements that are too old are dropped."""
        limit = self._clock() - FORGET_S
        for pair in [p for p, (_, at) in self._measured.items() if at < limit]:
            del self._measured[pair]
        return Fabric(
            default_bytes_per_s=DEFAULT_BYTES_PER_S,
            measured={p: rate for p, (rate, _) in self._measured.items()},
            pull_setup_ms=PULL_SETUP_MS if self._pulls else None,
        )
