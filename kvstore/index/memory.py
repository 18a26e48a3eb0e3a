"""An index inside one process: for tests, and for a router and workers that share one. Same contract as the others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import IndexUnavailable
from kvstore.index.base import MAX_BATCHES, EventBatch, Snapshot, Tier, WorkerRecord, check_record, split_names


@dataclass(slots=True)
class _Registered:
    record: WorkerRecord
    load: bytes
    seen_s: float


@dataclass(slots=True)
class _Blocks:
    batches: deque[EventBatch]
    seen_s: float
    tiers: dict[int, set[bytes]] = field(default_factory=dict)


class MemoryIndex:
    """Not for several threads: one event loop reads and writes it."""

    def __init__(
        self, ttl_s: float = 15.0, *, max_batches: int = MAX_BATCHES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ignored = 0  # nothing foreign gets in
        self._ttl_s = ttl_s
        self._max_batches = max_batches
        self._clock = clock
        self._workers: dict[str, _Registered] = {}
        self._blocks: dict[tuple[str, str], _Blocks] = {}
        self._last_seq: dict[tuple[str, str], int] = {}
        self._changed = asyncio.Event()

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        check_record(record, load)
        self._expire()
        before = self._workers.get(record.worker_id)
        if before is not None and before.record.epoch != record.epoch:
            self._blocks.pop((record.worker_id, before.record.epoch), None)
        now_s = self._clock()
        self._workers[record.worker_id] = _Registered(record, load, now_s)
        if blocks := self._blocks.get((record.worker_id, record.epoch)):
            blocks.seen_s = now_s

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        self._blocks.pop((worker_id, epoch), None)
        self._last_seq.pop((worker_id, epoch), None)
        registered = self._workers.get(worker_id)
        if registered is not None and registered.record.epoch == epoch:
            del self._workers[worker_id]

    async def publish(
        self, worker_id: str, epoch: str, stored: Sequence[bytes], removed: Sequence[bytes], tier: int = Tier.DEVICE
    ) -> None:
        for new, gone in split_names(stored, removed):
            self._expire()
            blocks = self._blocks.get((worker_id, epoch))
            if blocks is None:
                if (worker_id, epoch) in self._last_seq:
                    raise IndexUnavailable(f"the index lost the blocks of {worker_id}: they must be published again")
                blocks = self._start(worker_id, epoch)
            names = blocks.tiers.setdefault(tier, set())
            names.update(new)
            names.difference_update(gone)
            seq = self._next(worker_id, epoch)
            self._append(blocks, EventBatch(worker_id, epoch, seq, tuple(new), tuple(gone), tier=tier))

    async def clear(self, worker_id: str, epoch: str) -> None:
        self._expire()
        blocks = self._blocks.get((worker_id, epoch))
        if blocks is None:
            if (worker_id, epoch) in self._last_seq:
                self._next(worker_id, epoch)  # a hole, so that readers notice
            blocks = self._start(worker_id, epoch)
        blocks.tiers = {}
        seq = self._next(worker_id, epoch)
        self._append(blocks, EventBatch(worker_id, epoch, seq, (), (), cleared=True))

    async def holds(self, worker_id: str, epoch: str) -> bool:
        self._expire()
        return (worker_id, epoch) in self._blocks

    async def workers(self) -> list[WorkerRecord]:
        self._expire()
        return [self._workers[worker_id].record for worker_id in sorted(self._workers)]

    async def load(self, worker_id: str) -> bytes:
        self._expire()
        registered = self._workers.get(worker_id)
        return registered.load if registered else b""

    async def snapshot(self, worker_id: str, epoch: str) -> Snapshot:
        self._expire()
        blocks = self._blocks.get((worker_id, epoch))
        if blocks is None:
            return Snapshot(0, frozenset())
        names = {tier: frozenset(held) for tier, held in blocks.tiers.items() if held}
        return Snapshot(self._last_seq[worker_id, epoch], names.pop(Tier.DEVICE, frozenset()), names)

    async def read(self, cursors: Mapping[tuple[str, str], int], wait_s: float) -> list[EventBatch]:
        try:
            async with asyncio.timeout(wait_s):
                while not (found := self._after(cursors)):
                    await self._changed.wait()
        except TimeoutError:
            return self._after(cursors)
        return found

    async def ping(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing is open."""

    def _after(self, cursors: Mapping[tuple[str, str], int]) -> list[EventBatch]:
        self._expire()
        held = ((self._blocks[key], cursor) for key, cursor in cursors.items() if key in self._blocks)
        return [batch for blocks, cursor in held for batch in blocks.batches if batch.seq > cursor]

    def _start(self, worker_id: str, epoch: str) -> _Blocks:
        blocks = _Blocks(deque(maxlen=self._max_batches), self._clock())
        self._blocks[worker_id, epoch] = blocks
        return blocks

    def _next(self, worker_id: str, epoch: str) -> int:
        seq = self._last_seq.get((worker_id, epoch), 0) + 1
        self._last_seq[worker_id, epoch] = seq
        return seq

    def _append(self, blocks: _Blocks, batch: EventBatch) -> None:
        blocks.batches.append(batch)
        blocks.seen_s = self._clock()
        self._changed.set()
        self._changed = asyncio.Event()

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        for worker_id in [w for w, registered in self._workers.items() if registered.seen_s < oldest_s]:
            del self._workers[worker_id]
        for key in [k for k, blocks in self._blocks.items() if blocks.seen_s < oldest_s]:
            del self._blocks[key]
