"""Who holds which block: hints that workers publish and routers read.

Nothing depends on them for being right or alive. A wrong hint costs a cache hit, a missing store costs all of them.

    worker                                    router
    announce (each heartbeat)  ─► record ───► workers, load
    publish  ─► batch 1, 2, 3… ─► stream ───► read(cursors)        numbers without holes
                     └─ at once ► block set ► snapshot             the set as it is after batch `seq`
    clear    ─► one batch that empties the set
    withdraw ─► everything of that epoch is gone

A reader takes a snapshot, then reads the batches after ``snapshot.seq``. Where a number is missing (the stream keeps a
bounded tail, or the store lost its data) it takes a new snapshot.

A store may lose its data: it was started again, it evicted, or a worker was silent for longer than the time to live.
The publisher finds out by `holds`, or by a `publish` that raises; then it calls `clear` and publishes all its blocks.
The numbers go on above the old ones with a hole, so every reader finds out too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvstore.blocks import NAME_BYTES
from kvstore.errors import IndexUnavailable

MAX_NAMES_PER_BATCH = 4096
"""A larger `publish` becomes several batches."""

MAX_RECORD_BYTES = 64 << 10
"""Of a registration's payload, and of a load."""

MAX_BATCHES = 1024
"""A stream keeps at least so many of its last batches."""


class Tier(IntEnum):
    """Where a worker has a block: in its engine's own pool, or behind it, where a load fetches it from."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    STORE = 3


NUM_TIERS = 16
"""Numbers above are no tier of any version to come."""


class SnapshotRefused(IndexUnavailable):
    """One worker's set cannot be read; the store itself answers."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One process start of one worker."""

    worker_id: str
    epoch: str
    payload: bytes  # the signed registration; opaque here, to be verified by the reader


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One change of one worker's block set, in one tier. ``cleared``: all tiers were emptied; there are no names."""

    worker_id: str
    epoch: str
    seq: int  # 1, 2, 3, … within the epoch
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    cleared: bool = False
    tier: int = Tier.DEVICE  # one of a later version is no error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's blocks after its batch ``seq``; 0: it has published nothing."""

    seq: int
    names: frozenset[bytes]
    lower: Mapping[int, frozenset[bytes]] = field(default_factory=dict)  # by tier, without the device's


class BlockIndex(Protocol):
    """Every call but `close` may raise IndexUnavailable, and none waits longer than its own bound.

    Entries that cannot be read (another program's, another version's) are skipped and counted in ``ignored``.
    """

    ignored: int

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        """Register, or refresh, a worker: its record, its load, and the life of its block set and stream.

        Called at each heartbeat. Another epoch than before takes the worker over: the old one's blocks are gone.
        Raises ValueError on what `check_record` refuses.
        """

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        """Forget this epoch. A newer epoch of the worker stays untouched."""

    async def publish(
        self, worker_id: str, epoch: str, stored: Sequence[bytes], removed: Sequence[bytes], tier: int = Tier.DEVICE
    ) -> None:
        """Add to and remove from the worker's block set, and append that as numbered batches, at once for each batch.

        Names in both are removed. Nothing to say makes no batch. After an error it is not known which batches were
        taken; publishing the same again is harmless.

        Raises:
            ValueError: a name that has not 16 bytes.
            IndexUnavailable: also where the store lost what this epoch published before: `clear`, then publish it all.
        """

    async def clear(self, worker_id: str, epoch: str) -> None:
        """Empty the worker's block set, in all tiers, at a cost that does not grow with it.

        Also the start anew after a loss.
        """

    async def holds(self, worker_id: str, epoch: str) -> bool:
        """Whether the store still has what this epoch published; False also where it never published."""

    async def workers(self) -> list[WorkerRecord]:
        """Those whose last `announce` is younger than the time to live, by worker id."""

    async def load(self, worker_id: str) -> bytes:
        """What the worker's last `announce` carried; empty where the worker is unknown."""

    async def snapshot(self, worker_id: str, epoch: str) -> Snapshot:
        """The block set together with the number of the batch that it includes last."""

    async def read(self, cursors: Mapping[tuple[str, str], int], wait_s: float) -> list[EventBatch]:
        """Batches above each (worker_id, epoch)'s cursor, in order; waits for the first at most ``wait_s``.

        What the stream no longer holds is left out; the reader sees the gap in the numbers.
        """

    async def ping(self) -> bool:
        """Whether the store answers; never raises."""

    async def close(self) -> None: ...


def split_names(stored: Sequence[bytes], removed: Sequence[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Cut one change into (stored, removed) pieces of at most `MAX_NAMES_PER_BATCH` names together, none in both.

    Raises ValueError on a name that has not 16 bytes, before it yields anything.
    """
    for name in (*stored, *removed):
        if len(name) != NAME_BYTES:
            raise ValueError(f"a block name has {NAME_BYTES} bytes, got {len(name)}")
    gone = dict.fromkeys(removed)
    changes = [(name, False) for name in gone] + [(name, True) for name in dict.fromkeys(stored) if name not in gone]
    return _pieces(changes)


def _pieces(changes: list[tuple[bytes, bool]]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    for start in range(0, len(changes), MAX_NAMES_PER_BATCH):
        piece = changes[start : start + MAX_NAMES_PER_BATCH]
        yield [name for name, is_stored in piece if is_stored], [name for name, is_stored in piece if not is_stored]


def check_record(record: WorkerRecord, load: bytes) -> None:
    """Raise ValueError on a record without ids or one that is too large to be kept for every reader."""
    if not record.worker_id or not record.epoch:
        raise ValueError("a worker record needs worker_id and epoch")
    if max(len(record.payload), len(load)) > MAX_RECORD_BYTES:
        raise ValueError(f"registration and load may have {MAX_RECORD_BYTES} bytes each")
