"""The reading half of the transfer process: one listener for each peer that may write here, and the check of what
landed.

Listener of a peer:    absent ─► open ◄─► closed while it is fenced ─► absent, when the peer's epoch is over

Each peer has a thread, since opening and fencing take up to 2 s; it handles that peer's messages in their order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.errors import KVError
from kvstore.geometry import KVGeometry
from kvstore.transfer import messages as m
from kvstore.transfer.base import Listener, Peer, Region
from kvstore.transfer.digest import find_bad
from kvstore.transfer.several import Several

log = logging.getLogger("pdray.transfer")


@dataclass(frozen=True, slots=True)
class Reply:
    message: object


@dataclass(frozen=True, slots=True)
class ListenerFenced:
    """The reading half of a Fence is over; ``segment`` is empty where no listener was opened again."""

    peer: Peer
    segment: str


@dataclass(frozen=True, slots=True)
class ListenerStuck:
    """Only the end of this process fences that peer."""

    peer: Peer
    reason: str


ReaderEvent = Reply | ListenerFenced | ListenerStuck
PeerMessage = m.OpenListener | m.Allow | m.Revoke | m.Fence


class Port:
    """One peer's listener and the tickets that may land through it, handled in one thread."""

    def __init__(self, transports: Several, region: Region, peer: Peer, report: Callable[[ReaderEvent], None]) -> None:
        self._transports = transports
        self._name = ""  # of the transport that it listens with; empty: the first
        self._region = region
        self._peer = peer
        self._report = report
        self._inbox: queue.SimpleQueue[PeerMessage] = queue.SimpleQueue()
        self._listener: Listener | None = None
        self._tickets: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"port-{peer.worker_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: PeerMessage) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        while True:
            message = self._inbox.get()
            try:
                match message:
                    case m.OpenListener():
                        self._open(message.transport)
                    case m.Allow():
                        self._allow(message.ticket_id)
                    case m.Revoke():
                        self._revoke(message.ticket_id)
                    case m.Fence():
                        self._fence(message.forget)
            except KVError as exc:
                self._report(ListenerStuck(self._peer, str(exc)))
                return
            if isinstance(message, m.Fence) and message.forget:
                return

    def _open(self, name: str) -> None:
        segment, error = "", ""
        try:
            if self._listener is None:
                self._name, self._listener = name, self._listen(name)
            segment = self._listener.segment
        except (KVError, OSError) as exc:
            error = str(exc)
        worker_id, epoch = self._peer.worker_id, self._peer.epoch
        self._report(Reply(m.ListenerReady(worker_id=worker_id, epoch=epoch, segment=segment, error=error)))

    def _listen(self, name: str) -> Listener:
        return self._transports.named(name).listen(self._region, self._peer)

    def _allow(self, ticket_id: str) -> None:
        self._tickets.add(ticket_id)
        if self._listener is not None:
            self._listener.allow(ticket_id)

    def _revoke(self, ticket_id: str) -> None:
        self._tickets.discard(ticket_id)
        fenced = self._listener is None or self._listener.revoke(ticket_id)
        self._report(Reply(m.TicketClosed(ticket_id=ticket_id, fenced=fenced)))

    def _fence(self, forget: bool) -> None:
        """Close, and unless the peer is over open again for its other tickets. Raises KVError where closing failed."""
        segment = ""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if not forget:
                segment = self._open_again()
        self._report(ListenerFenced(self._peer, segment))

    def _open_again(self) -> str:
        try:
            self._listener = self._listen(self._name)
        except (KVError, OSError) as exc:
            log.warning("no listener for %s after its fence: %s", self._peer.worker_id, exc)
            return ""
        for ticket_id in self._tickets:
            self._listener.allow(ticket_id)
        return self._listener.segment


class Reader:
    """Owns the ports; its methods are for the main thread only."""

    def __init__(
        self,
        transports: Several,
        region: Region,
        memory: memoryview,
        start: m.Start,
        report: Callable[[ReaderEvent], None],
    ) -> None:
        self._transports = transports
        self._region = region
        self._memory = memory
        self._geometry = KVGeometry.from_dict(start.geometry)
        self._digests = start.digests
        self._report = report
        self._ports: dict[Peer, Port] = {}
        self._hashers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash-target")

    def handle(self, message: object) -> bool:
        """False: the message is not one for a reader."""
        match message:
            case m.OpenListener():
                self._port(Peer(message.worker_id, message.epoch)).put(message)
            case m.Allow():
                self._port(Peer(message.worker_id, message.epoch)).put(message)
            case m.Revoke():
                port = self._ports.get(Peer(message.worker_id, message.epoch))
                if port is None:
                    self._report(Reply(m.TicketClosed(ticket_id=message.ticket_id, fenced=True)))
                else:
                    port.put(message)
            case m.Verify():
                self._hashers.submit(self._verify, message)
            case _:
                return False
        return True

    def fence(self, message: m.Fence) -> None:
        """Ends in a ListenerFenced event."""
        peer = Peer(message.worker_id, message.epoch)
        port = self._ports.pop(peer, None) if message.forget else self._ports.get(peer)
        if port is None:
            self._report(ListenerFenced(peer, ""))
        else:
            port.put(message)

    def _port(self, peer: Peer) -> Port:
        port = self._ports.get(peer)
        if port is None:
            port = self._ports[peer] = Port(self._transports, self._region, peer, self._report)
            port.start()
        return port

    def _verify(self, message: m.Verify) -> None:
        bad = find_bad(self._memory, self._geometry, message.extents) if self._digests else ()
        self._report(Reply(m.Verified(ticket_id=message.ticket_id, bad=bad)))
