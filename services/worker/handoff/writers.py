"""The writers that this worker gave blocks to: their leases, and what is quarantined because of them.

    listening ──lease lapsed | new epoch──► fencing (its tickets are over, nothing new is let in) ──Fenced──► forgotten

A ticket's blocks leave quarantine one by one when the writer, or the transport, vouches for that ticket, and all
together when our memory has been closed to the writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.transfer import messages as t
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import Inbound, WriterKey

SWEEP_S = 0.5


@dataclass(slots=True)
class Writer:
    """One process start of one worker."""

    listener: asyncio.Future[t.ListenerReady]
    last_lease_s: float
    tickets: dict[str, Inbound] = field(default_factory=dict)  # open ones
    quarantined: dict[str, Inbound] = field(default_factory=dict)
    unconfirmed: set[str] = field(default_factory=set)  # quarantined, and the writer cannot vouch for them
    irrevocable: set[str] = field(default_factory=set)  # quarantined, and the transport cannot vouch for them
    refencing: set[str] = field(default_factory=set)  # wait for the Fenced that is under way
    fencing: bool = False
    transport: str = ""  # that it comes by; empty: our own


class Writers:
    """``free`` says that nothing can land any more in blocks that were quarantined under a sequence id, ``on_lapse``
    that a writer is being fenced for good, and with it every channel to it."""

    def __init__(
        self, core: WorkerCore, free: Callable[[str], None], on_lapse: Callable[[WriterKey, str], None]
    ) -> None:
        self._core = core
        self._free = free
        self._on_lapse = on_lapse
        self._writers: dict[WriterKey, Writer] = {}

    def check_open(self, key: WriterKey) -> None:
        """Raise RequestError while this writer is being fenced."""
        writer = self._writers.get(key)
        if writer is not None and writer.fencing:
            raise RequestError(ErrorCode.TRANSFER_FAILED, f"writer {key[0]} is being fenced here; try again")

    def add(self, inbound: Inbound) -> asyncio.Future[t.ListenerReady]:
        """The ticket counts for its writer's lease from now on; the future tells how the writer reaches our memory."""
        key = inbound.writer
        for old in [k for k in self._writers if k[0] == key[0] and k[1] != key[1]]:
            self.lapse(old, f"{old[0]} came back with a new epoch")
        writer = self._writers.get(key)
        if writer is None:
            writer = self._new(key)
            writer.transport = inbound.transport
            self._open(key, writer)
        if not writer.tickets:
            writer.last_lease_s = self._core.clock()
        writer.tickets[inbound.ticket_id] = inbound
        return writer.listener

    def remove(self, inbound: Inbound) -> None:
        writer = self._writers.get(inbound.writer)
        if writer is not None:
            writer.tickets.pop(inbound.ticket_id, None)

    def quarantine(self, inbound: Inbound) -> None:
        """Keep the ticket's blocks until someone vouches that nothing can land in them."""
        self._writers[inbound.writer].quarantined[inbound.ticket_id] = inbound
        worker_id, epoch = inbound.writer
        self._core.send_transfer(t.Revoke(ticket_id=inbound.ticket_id, worker_id=worker_id, epoch=epoch))

    def vouch(self, ticket_id: str) -> None:
        """Nothing of this ticket can land any more: its blocks are free, if they were quarantined."""
        for writer in self._writers.values():
            inbound = writer.quarantined.pop(ticket_id, None)
            if inbound is not None:
                inbound.move(HandoffState.FREE)
                self._free(inbound.live.seq_id)
            for waiting in (writer.unconfirmed, writer.irrevocable, writer.refencing):
                waiting.discard(ticket_id)

    def cannot_vouch(self, ticket_id: str, *, writer_says: bool) -> None:
        """The writer (or else the transport here) cannot exclude that something still lands.

        Where both say so our memory is closed to the writer for a moment; its other tickets go on by themselves.
        """
        for key, writer in self._writers.items():
            if ticket_id not in writer.quarantined:
                continue
            (writer.unconfirmed if writer_says else writer.irrevocable).add(ticket_id)
            if ticket_id in writer.unconfirmed & writer.irrevocable and not writer.fencing:
                writer.refencing.add(ticket_id)
                self._core.send_transfer(t.Fence(worker_id=key[0], epoch=key[1]))

    def renew(self, request: worker_pb2.LeaseRequest) -> None:
        """One list of a writer's open tickets; what it leaves out is fenced on its side."""
        writer = self._writers.get((request.writer_id, request.writer_epoch))
        if writer is None or request.reader_epoch != self._core.registration.epoch:
            return
        named = set(request.ticket_ids)
        writer.last_lease_s = self._core.clock()
        tickets = [x for x in (*writer.quarantined.values(), *writer.tickets.values()) if x.trusts_lists]
        for inbound in [x for x in tickets if x.ticket_id not in named and request.number > x.last_list]:
            if inbound.ticket_id in writer.tickets:
                inbound.on_end(inbound, "a list of the writer left the ticket out", True)
            elif inbound.ticket_id not in writer.unconfirmed:
                self.vouch(inbound.ticket_id)

    def lapse(self, key: WriterKey, reason: str) -> None:
        """All tickets of this writer are over; their blocks stay quarantined until our memory is closed to it.

        One that was never let in is not let in before that either.
        """
        writer = self._writers.get(key) or self._new(key)
        for inbound in list(writer.tickets.values()):
            inbound.on_end(inbound, reason, False)
        if not writer.fencing:
            writer.fencing = True
            self._on_lapse(key, reason)
            self._core.send_transfer(t.Fence(worker_id=key[0], epoch=key[1], forget=True))

    def lose_all(self, reason: str) -> None:
        """The transfer process ended, and with it every way into our memory."""
        for key in list(self._writers):
            self.lapse(key, reason)
            self.on_fenced(key)

    def reopen(self) -> None:
        """Another transfer process runs, which has heard of nobody."""
        for key, writer in list(self._writers.items()):
            if writer.fencing:
                self.on_fenced(key)
            else:
                self._open(key, writer)

    def on_listener(self, message: t.ListenerReady) -> None:
        writer = self._writers.get((message.worker_id, message.epoch))
        if writer is not None and not writer.listener.done():
            writer.listener.set_result(message)

    def on_fenced(self, key: WriterKey) -> None:
        writer = self._writers.get(key)
        if writer is None:
            return
        for ticket_id in list(writer.quarantined if writer.fencing else writer.refencing):
            self.vouch(ticket_id)
        if writer.fencing:
            del self._writers[key]

    def sweep(self) -> None:
        """Lapse the leases that nobody renewed. Only granted or quarantined tickets need one."""
        lease_s = self._core.config.transfer.lease_ms / 1000
        now = self._core.clock()
        for key, writer in list(self._writers.items()):
            held = writer.quarantined or any(x.state is not HandoffState.REQUESTED for x in writer.tickets.values())
            if held and not writer.fencing and now - writer.last_lease_s > lease_s:
                self.lapse(key, f"the lease lapsed: {key[0]} was silent for {lease_s:.0f} s")

    def _new(self, key: WriterKey) -> Writer:
        listener: asyncio.Future[t.ListenerReady] = asyncio.get_running_loop().create_future()
        writer = self._writers[key] = Writer(listener, self._core.clock())
        return writer

    def _open(self, key: WriterKey, writer: Writer) -> None:
        self._core.send_transfer(t.OpenListener(worker_id=key[0], epoch=key[1], transport=writer.transport))
