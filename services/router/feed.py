"""Keeps the view's block sets up to date from the index, behind everything else: no request ever waits for it.

read(cursors) ─► batches ─► apply ─┬─ in order ──► known ──more than redis.max_blocks──► forgotten ──room──┐
                                   └─ gap, new epoch, index back after a failure ─► snapshot ─► known ◄────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from kvstore.errors import IndexUnavailable
from kvstore.index.base import BlockIndex, EventBatch, Snapshot, SnapshotRefused
from services.protocol.tasks import end
from services.router.names import NameSet
from services.router.residency import Residency, forget_beyond, with_room
from services.telemetry.metrics import RouterMetrics

Key = tuple[str, str]  # worker id, epoch
READ_WAIT_S = 0.25
RETRY_S = 0.5
RECHECK_S = 60.0
"""Every worker's set is read anew this often, one at a time: a feed that started over unnoticed heals."""
MAX_BLOCKS = 16_000_000
APART_NAMES = 4096
"""A larger snapshot is put together in a thread: at a microsecond a name it would hold up the router."""

_log = logging.getLogger("pdray.router.feed")


class ResidencySource(Protocol):
    """The part of the view that the feed fills."""

    def residencies(self) -> Mapping[Key, Residency]:
        """Of every worker that is attached now."""
        ...


class Feed:
    """One task. `up` says whether the index answered last time."""

    def __init__(
        self,
        index: BlockIndex,
        view: ResidencySource,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        kind: str = "standalone",
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """``kind``: what the index is, as `pdray_index_mode` says it while it answers."""
        self._kind = kind
        self._max_blocks = max_blocks
        self._index = index
        self._view = view
        self._metrics = metrics
        self._clock = clock
        self._checked_s: dict[Key, float] = {}
        self._ignored_before = 0
        self._task: asyncio.Task[None] | None = None
        self.up = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="index-feed")

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
                self._set_up(True)
            except IndexUnavailable as exc:
                self._set_up(False, str(exc))
                self._checked_s.clear()  # what was missed meanwhile, or lost with the store, is read anew
                await asyncio.sleep(RETRY_S)

    async def step(self) -> None:
        """One round: snapshots where they are due, then the next batches. Raises IndexUnavailable."""
        known = self._view.residencies()
        for key in [k for k in self._checked_s if k not in known]:
            del self._checked_s[key]
        rows = list(known.values())
        back = {id(r) for r in with_room(rows, self._max_blocks)}
        for key in [key for key, r in known.items() if id(r) in back]:
            self._checked_s.pop(key, None)
        await self._snapshot_due(known)
        cursors = {key: r.seq for key, r in known.items() if r.seq >= 0}
        if not cursors:
            if not await self._index.ping():
                raise IndexUnavailable("no answer to a ping")
            await asyncio.sleep(READ_WAIT_S)
            return
        for batch in await self._index.read(cursors, READ_WAIT_S):
            self._apply(known, batch)
        self._bound(known)
        ignored = int(getattr(self._index, "ignored", 0))
        self._metrics.index_ignored.inc(max(0, ignored - self._ignored_before))
        self._ignored_before = ignored

    async def _snapshot_due(self, known: Mapping[Key, Residency]) -> None:
        """All workers never read, and the one that was read longest ago if that is too long."""
        now = self._clock()
        due = [key for key in known if key not in self._checked_s]
        stale = [
            key
            for key, r in known.items()
            if now - self._checked_s.get(key, now) > RECHECK_S and not r.forgotten_blocks
        ]
        due += sorted(stale, key=lambda k: self._checked_s[k])[:1]
        for key in due:
            residency, before = known[key], known[key].seq
            try:
                snapshot = await self._index.snapshot(*key)
            except SnapshotRefused as exc:
                _log.warning("the block set of %s is not read: %s", key[0], exc)
                self._metrics.index_ignored.inc()
                residency.replace(-1, NameSet())
                self._checked_s[key] = now
                continue
            many = len(snapshot.names) + sum(map(len, snapshot.lower.values())) > APART_NAMES
            fresh, lower = await asyncio.to_thread(_sets, residency, snapshot) if many else _sets(residency, snapshot)
            changed = residency.replace(snapshot.seq, fresh, lower)
            self._checked_s[key] = now
            if snapshot.seq < before or (snapshot.seq == before and changed):
                self._metrics.view_gaps_repaired.inc()  # the stream had started over without a trace
            self._bound(known)

    def _bound(self, known: Mapping[Key, Residency]) -> None:
        self._metrics.view_forgotten.inc(forget_beyond(known.values(), self._max_blocks))
        self._metrics.view_blocks.set(sum(r.kept_blocks for r in known.values()))

    def _apply(self, known: Mapping[Key, Residency], batch: EventBatch) -> None:
        key = (batch.worker_id, batch.epoch)
        residency = known.get(key)
        if residency is None:
            self._metrics.index_ignored.inc()
        elif (
            not residency.apply(batch.seq, batch.stored, batch.removed, batch.cleared, batch.tier)
            and key in self._checked_s
        ):
            del self._checked_s[key]  # read a snapshot next round
            self._metrics.view_gaps_repaired.inc()

    def _set_up(self, up: bool, reason: str = "") -> None:
        if up != self.up:
            _log.log(logging.INFO if up else logging.WARNING, "index %s %s", "answers" if up else "is down:", reason)
        self.up = up
        self._metrics.redis_up.set(int(up))
        self._metrics.index_mode.state(self._kind if up else "down")


def _sets(residency: Residency, snapshot: Snapshot) -> tuple[NameSet, dict[int, NameSet]]:
    return residency.new_set(snapshot.names), {tier: NameSet(names) for tier, names in snapshot.lower.items()}
