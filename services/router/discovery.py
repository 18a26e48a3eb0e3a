"""Where workers may be: addresses from a static list, from Redis, and from whatever else is given (Ray's replicas).

Each source is asked on its own, so a slow one delays none. What a source said last stays while it fails. Whether a
worker lives is decided by Attach alone; nothing here ever declares one dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from google.protobuf.message import DecodeError

from kvstore.index.base import BlockIndex
from services.protocol.auth import verify_registration
from services.protocol.proto import worker_pb2
from services.protocol.tasks import end
from services.telemetry.metrics import RouterMetrics

Source = Callable[[], Awaitable[list[str]]]
"""Returns host:port of workers; may raise."""
POLL_S = 0.5
SOURCE_TIMEOUT_S = 5.0
MAX_ADDRESSES = 4096

_log = logging.getLogger("pdray.router.discovery")


class RedisSource:
    """Addresses from registrations in the index whose signature holds."""

    def __init__(self, index: BlockIndex, secret: str, metrics: RouterMetrics) -> None:
        self._index = index
        self._secret = secret
        self._metrics = metrics
        self._refused: set[tuple[str, str]] = set()

    async def __call__(self) -> list[str]:
        """Raises IndexUnavailable."""
        found = []
        for record in await self._index.workers():
            registration = self._verified(record.payload)
            if registration is None or (registration.worker_id, registration.epoch) != (record.worker_id, record.epoch):
                if (record.worker_id, record.epoch) not in self._refused and len(self._refused) < MAX_ADDRESSES:
                    self._refused.add((record.worker_id, record.epoch))
                    self._metrics.index_ignored.inc()
                    _log.warning("the registration of %r in Redis is not ours; ignored", record.worker_id[:80])
                continue
            found.append(registration.address)
        return found

    def _verified(self, payload: bytes) -> worker_pb2.Registration | None:
        try:
            registration = worker_pb2.Registration.FromString(payload)
        except DecodeError:
            return None
        return registration if verify_registration(registration, self._secret) else None


class Discovery:
    """One task for each source; ``on_addresses`` gets the union of what they said last, whenever that changes."""

    def __init__(
        self,
        static: Sequence[str],
        sources: Sequence[Source],
        on_addresses: Callable[[frozenset[str]], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._static = frozenset(static)
        self._sources = list(sources)
        self._last: list[frozenset[str]] = [frozenset()] * len(self._sources)
        self._on_addresses = on_addresses
        self._poll_s = poll_s
        self._told: frozenset[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tell()
        self._tasks = [asyncio.create_task(self._poll(i), name=f"discovery-{i}") for i in range(len(self._sources))]

    async def stop(self) -> None:
        await end(*self._tasks)

    async def _poll(self, index: int) -> None:
        failing = False
        while True:
            try:
                async with asyncio.timeout(SOURCE_TIMEOUT_S):
                    addresses = await self._sources[index]()
            except Exception as exc:  # the edge of the process: a source is somebody else's code
                failing = self._failed(index, failing, exc)
            else:
                failing = False
                self._last[index] = frozenset(addresses[:MAX_ADDRESSES])
                self._tell()
            await asyncio.sleep(self._poll_s)

    def _failed(self, index: int, failing: bool, exc: Exception) -> bool:
        """Logged once, when it begins."""
        if not failing:
            _log.warning("source %d of worker addresses fails, its last ones stay: %r", index, exc)
        return True

    def _tell(self) -> None:
        union = self._static.union(*self._last)
        if union != self._told:
            self._told = union
            self._on_addresses(union)
