"""The worker's end of Attach: an outbox for each router, a message per step with all that its requests produced.

    add_* ─► pending ─flush─► numbered, kept until acknowledged ─► the stream that is attached now
                                      └─ over MAX_KEPT, or no stream for GRACE_S ─► the router's requests are aborted

Numbers are per router epoch. A re-attach names the last number it saw; what came after is sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.protocol.version import PROTOCOL_VERSION, apart

GRACE_S = 5.0
"""How long a router may be detached before its requests are aborted."""
MAX_KEPT = 4096
"""Messages kept for a router that does not acknowledge; one more and it counts as lost."""
LOAD_EVERY_S = 1.0
RouterKey = tuple[str, str]  # router id, router epoch

_log = logging.getLogger("pdray.worker.attach")


@dataclass(slots=True)
class _Outbox:
    pending: worker_pb2.WorkerMessage = field(default_factory=worker_pb2.WorkerMessage)
    dirty: bool = False
    seq: int = 0
    kept: deque[worker_pb2.WorkerMessage] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream: object | None = None  # token of the stream that is attached now
    sent: int = 0  # highest number given to that stream
    detached_s: float = 0.0
    is_load_due: bool = False


class AttachHub:
    """Buffers what requests produce for the routers that own them. All methods run on the event loop."""

    def __init__(
        self,
        registration: Callable[[], worker_pb2.Registration],
        load: Callable[[], worker_pb2.Load],
        on_router_lost: Callable[[RouterKey], None],
        clock: Callable[[], float],
    ) -> None:
        self._registration = registration
        self._load = load
        self._on_router_lost = on_router_lost
        self._clock = clock
        self._outboxes: dict[RouterKey, _Outbox] = {}
        self._flushing = False
        self._closed = False

    @property
    def attached(self) -> int:
        return sum(1 for box in self._outboxes.values() if box.stream is not None)

    def add_output(self, router: RouterKey, output: worker_pb2.Output) -> None:
        self._box(router).pending.outputs.append(output)
        self._touch(router)

    def add_event(self, router: RouterKey, event: worker_pb2.TimelineEvent) -> None:
        self._box(router).pending.events.append(event)
        self._touch(router)

    def add_handoff(self, router: RouterKey, report: worker_pb2.HandoffReport) -> None:
        self._box(router).pending.handoffs.append(report)
        self._touch(router)

    def add_pull(self, router: RouterKey, report: worker_pb2.PullReport) -> None:
        self._box(router).pending.pulls.append(report)
        self._touch(router)

    def announce(self) -> None:
        """Send the registration again, to every router: it changed."""
        for router in list(self._outboxes):
            self._outboxes[router].pending.registration.CopyFrom(self._registration())
            self._touch(router)

    def tell_load(self) -> None:
        """Send the load now: it changed, and nothing else may be said for a while."""
        for box in self._outboxes.values():
            box.is_load_due = True
            box.wake.set()

    def flush(self) -> None:
        """Number and release everything added so far: once a step, so that a step is one message for each router."""
        self._flushing = False
        for router, box in list(self._outboxes.items()):
            if not box.dirty:
                continue
            box.dirty = False
            message, box.pending = box.pending, worker_pb2.WorkerMessage()
            box.seq += 1
            message.seq = box.seq
            box.kept.append(message)
            box.wake.set()
            if len(box.kept) > MAX_KEPT:
                self._lose(router, f"{len(box.kept)} messages are not acknowledged")

    async def serve(self, requests: AsyncIterator[worker_pb2.RouterMessage]) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """One Attach stream, from its first router message to its end. Raises RequestError INCOMPATIBLE_WORKERS."""
        hello = await anext(aiter(requests), None)
        if hello is None:
            return
        why = apart(hello.protocol_version, PROTOCOL_VERSION, f"router {hello.router_id}", "this worker")
        if why:
            raise RequestError(ErrorCode.INCOMPATIBLE_WORKERS, why)
        router = (hello.router_id, hello.router_epoch)
        for other in [k for k in self._outboxes if k[0] == router[0] and k[1] != router[1]]:
            self._lose(other, "the router came back with a new epoch")
        box, stream = self._box(router), object()
        box.stream = stream
        box.sent = min(hello.last_seq, box.seq)  # a new outbox counts anew; the router sees the jump
        self._acknowledge(box, hello.last_seq)
        box.wake.set()
        reader = asyncio.create_task(self._read_acks(requests, box), name="attach-acks")
        first = worker_pb2.WorkerMessage(registration=self._registration())
        self._stamp(first)
        try:
            yield first
            while box.stream is stream and not reader.done():
                for message in self._unsent(box):
                    box.sent = message.seq
                    self._stamp(message)  # now, so that no older load follows a newer one
                    yield message
                if self._closed:
                    break
                box.wake.clear()
                is_woken = box.is_load_due or await _wait(box.wake, LOAD_EVERY_S)
                if box.is_load_due or not is_woken:
                    box.is_load_due = False
                    tick = worker_pb2.WorkerMessage()
                    self._stamp(tick)
                    yield tick
        finally:
            reader.cancel()
            if box.stream is stream:
                box.stream, box.detached_s = None, self._clock()

    def sweep(self) -> None:
        """Give up routers that have been detached for longer than the grace; call it about once a second."""
        now = self._clock()
        for router, box in list(self._outboxes.items()):
            if box.stream is None and now - box.detached_s > GRACE_S:
                self._lose(router, f"no Attach for {GRACE_S:.0f} s")

    def close(self) -> None:
        """End every stream after what is buffered has been sent."""
        self.flush()
        self._closed = True
        for box in self._outboxes.values():
            box.wake.set()

    @property
    def drained(self) -> bool:
        """Every message has been acknowledged or has nobody to go to."""
        return all(not box.kept or box.stream is None for box in self._outboxes.values())

    def _unsent(self, box: _Outbox) -> list[worker_pb2.WorkerMessage]:
        return [m for m in box.kept if m.seq > box.sent]

    def _box(self, router: RouterKey) -> _Outbox:
        box = self._outboxes.get(router)
        if box is None:
            box = self._outboxes[router] = _Outbox(detached_s=self._clock())
        return box

    def _touch(self, router: RouterKey) -> None:
        self._outboxes[router].dirty = True
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _stamp(self, message: worker_pb2.WorkerMessage) -> None:
        registration = self._registration()
        message.worker_id, message.epoch = registration.worker_id, registration.epoch
        message.load.CopyFrom(self._load())

    def _lose(self, router: RouterKey, reason: str) -> None:
        box = self._outboxes.pop(router)
        box.stream = None
        box.wake.set()
        _log.info("router %s is lost: %s", router[0], reason)
        self._on_router_lost(router)

    @staticmethod
    def _acknowledge(box: _Outbox, last_seq: int) -> None:
        while box.kept and box.kept[0].seq <= last_seq:
            box.kept.popleft()

    async def _read_acks(self, requests: AsyncIterator[Any], box: _Outbox) -> None:
        try:
            async for message in requests:
                self._acknowledge(box, message.last_seq)
        finally:
            box.wake.set()


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
