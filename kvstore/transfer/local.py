"""The simplest transport: both memories are mapped in one process, and a write is a copy.

It serves tests and shows what a transport has to do. Writes are done when `Channel.submit` returns; tickets are
checked before bytes land, so revoking a ticket is a fence. It does not reach another process.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence

from kvstore.errors import SubmitFailed, TransferError
from kvstore.transfer.base import Peer, Region, Write, WriteState, check_source
from kvstore.transfer.gate import Gate
from kvstore.transfer.options import TransportOptions

COPY_S = 2.0
"""No copy within one process takes longer."""

_listeners: dict[str, LocalListener] = {}
_numbers = itertools.count()


class LocalListener:
    """Makes one region writable within this process."""

    def __init__(self, region: Region, peer: Peer) -> None:
        self.region = region
        self.segment = f"local:{next(_numbers)}:{peer.worker_id}:{peer.epoch}"
        self._gate = Gate()
        _listeners[self.segment] = self

    def allow(self, ticket_id: str) -> None:
        self._gate.allow(ticket_id)

    def revoke(self, ticket_id: str) -> bool:
        self._gate.forbid(ticket_id)
        return self._gate.wait_empty(ticket_id, COPY_S)

    def close(self) -> None:
        _listeners.pop(self.segment, None)

    def land(self, source: Region, write: Write) -> bool:
        """Copy, unless the ticket or the bounds forbid it."""
        fits = write.target_offset >= 0 and write.target_offset + write.num_bytes <= self.region.num_bytes
        if not fits or not self._gate.enter(write.ticket_id):
            return False
        try:
            target = self.region.address + write.target_offset
            ctypes.memmove(target, source.address + write.source_offset, write.num_bytes)
        finally:
            self._gate.leave(write.ticket_id)
        return True


class LocalChannel:
    def __init__(self, region: Region, segment: str) -> None:
        self._region = region
        self._segment = segment
        self._ids = itertools.count(1)
        self._states: dict[int, WriteState] = {}
        self._closed = False

    def submit(self, writes: Sequence[Write]) -> list[int]:
        listener = _listeners.get(self._segment)
        if self._closed or listener is None:
            raise SubmitFailed(f"{self._segment} is closed")
        check_source(self._region, writes)
        ids = []
        for write in writes:
            ids.append(next(self._ids))
            self._states[ids[-1]] = WriteState.DONE if listener.land(self._region, write) else WriteState.FAILED
        return ids

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        return {i: self._states.pop(i) for i in ids}

    def close(self) -> None:
        self._closed = True


class LocalTransport:
    name = "local"

    def __init__(self, options: TransportOptions) -> None:
        pass

    def listen(self, region: Region, peer: Peer) -> LocalListener:
        return LocalListener(region, peer)

    def connect(self, region: Region, peer: Peer, segment: str) -> LocalChannel:
        if segment not in _listeners:
            raise TransferError(f"nothing listens as {segment}")
        return LocalChannel(region, segment)
