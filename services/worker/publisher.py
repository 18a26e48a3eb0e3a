"""Keeps this worker's registration, load and block events in the index, as far as the index answers.

Hints only: nothing here may fail a request. While the index is down the publisher keeps the set of names that the
worker holds; when it answers again, or has lost its data, the whole set is published anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import IndexUnavailable
from kvstore.index.base import BlockIndex, Tier, WorkerRecord
from services.protocol.proto import worker_pb2
from services.protocol.tasks import end

BATCH_S = 0.05
"""Events of this long go out together."""
NAMES_PER_BATCH = 4096
RETRY_S = 1.0

_log = logging.getLogger("pdray.worker.publisher")


@dataclass(slots=True)
class _Held:
    """Names in one tier, oldest first (parents come before children), and what of them is not told yet."""

    names: dict[bytes, None] = field(default_factory=dict)
    stored: dict[bytes, None] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for name in removed:
            self.names.pop(name, None)
            if self.stored.pop(name, 0) == 0:
                self.removed[name] = None
        for name in stored:
            self.names[name] = None
            self.removed.pop(name, None)
            self.stored[name] = None


class Publisher:
    """One task; `note` is called from the event loop for each step."""

    def __init__(
        self,
        index: BlockIndex,
        registration: Callable[[], worker_pb2.Registration],
        load: Callable[[], worker_pb2.Load],
        heartbeat_s: float,
    ) -> None:
        self._index = index
        self._registration = registration
        self._load = load
        self._heartbeat_s = heartbeat_s
        self._held: dict[int, _Held] = {}  # by tier
        self._wake = asyncio.Event()
        self._republish = True
        self._announced_s = -1e9
        self._task: asyncio.Task[None] | None = None
        self.up = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="index-publisher")

    def note(
        self, stored: Sequence[bytes], removed: Sequence[bytes], tier: int = Tier.DEVICE, is_lost: bool = False
    ) -> None:
        """Blocks that this step made findable in a tier, and those it evicted; ``is_lost``: all it had before."""
        held = self._held.setdefault(tier, _Held())
        held.note(stored, [*held.names, *removed] if is_lost else removed)
        if held.stored or held.removed:
            self._wake.set()

    def announce_now(self) -> None:
        self._announced_s = -1e9
        self._wake.set()

    async def stop(self) -> None:
        """Withdraw the worker, waiting a second at most."""
        if self._task is not None:
            await end(self._task)
        registration = self._registration()
        try:
            async with asyncio.timeout(1.0):
                await self._index.withdraw(registration.worker_id, registration.epoch)
                await self._index.close()
        except (IndexUnavailable, TimeoutError) as exc:
            _log.info("the index did not take the withdrawal: %s", exc)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() - self._announced_s >= self._heartbeat_s:
                    await self._announce()
                    self._announced_s = loop.time()
                await self._publish()
                self._set_up(True)
            except IndexUnavailable as exc:
                self._set_up(False, str(exc))
                self._republish = True
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(max(0.0, self._heartbeat_s - (loop.time() - self._announced_s))):
                    await self._wake.wait()
                    await asyncio.sleep(BATCH_S)
            except TimeoutError:
                pass
            self._wake.clear()

    async def _announce(self) -> None:
        registration = self._registration()
        record = WorkerRecord(
            worker_id=registration.worker_id, epoch=registration.epoch, payload=registration.SerializeToString()
        )
        if not self._republish and not await self._index.holds(registration.worker_id, registration.epoch):
            self._republish = any(held.names for held in self._held.values())
        await self._index.announce(record, self._load().SerializeToString())

    async def _publish(self) -> None:
        registration = self._registration()
        worker_id, epoch = registration.worker_id, registration.epoch
        if self._republish:
            await self._index.clear(worker_id, epoch)
            for held in self._held.values():
                held.stored, held.removed = dict(held.names), {}
            self._republish = False
        for tier, held in sorted(self._held.items()):
            stored, removed = list(held.stored), list(held.removed)
            held.stored, held.removed = {}, {}
            for start in range(0, max(len(stored), len(removed)), NAMES_PER_BATCH):
                piece = slice(start, start + NAMES_PER_BATCH)
                await self._index.publish(worker_id, epoch, stored[piece], removed[piece], tier)

    def _set_up(self, up: bool, reason: str = "") -> None:
        if up != self.up:
            _log.log(logging.INFO if up else logging.WARNING, "index %s %s", "answers" if up else "is down:", reason)
        self.up = up
