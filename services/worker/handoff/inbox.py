"""A reader's tickets: who may write here, what of it is verified, and what became of those that ended early.

open ─► Writers.add ─► ListenerReady … Verify ─► Verified ─► keep
                                            └─ revoke ─► quarantine ─► free
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.transfer import messages as t
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import OPEN_STATES, HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import Inbound, WriterKey
from services.worker.handoff.writers import SWEEP_S, Writers

_KNOWN = OPEN_STATES | {HandoffState.COMMITTED}


class Inbox:
    """All tickets of one worker as a reader, whoever asked for them."""

    def __init__(
        self, core: WorkerCore, free: Callable[[str], None], on_lapse: Callable[[WriterKey, str], None]
    ) -> None:
        self._core = core
        self.tickets: dict[str, Inbound] = {}  # open ones, and committed ones while somebody wants to know of them
        self.writers = Writers(core, free, on_lapse)
        self._closed: dict[str, float] = {}  # tombstones: ticket id -> when it may be forgotten
        self._sweeper: asyncio.Task[None] | None = None

    def open(self, inbound: Inbound) -> asyncio.Future[t.ListenerReady]:
        """Take a ticket in; the future tells how its writer reaches our memory.

        Raises RequestError while that writer is being fenced, or where the ticket is over or open already.
        """
        self.check_new(inbound.ticket_id)
        self.writers.check_open(inbound.writer)
        if self._sweeper is None:
            self._sweeper = self._core.spawn(self._sweep(), "leases")
        self.tickets[inbound.ticket_id] = inbound
        return self.writers.add(inbound)

    def check_new(self, ticket_id: str) -> None:
        """Raise RequestError STALE for a ticket that is over or open already."""
        if ticket_id in self._closed or ticket_id in self.tickets:
            raise RequestError(ErrorCode.STALE, f"ticket {ticket_id} is closed or open already")

    def bury(self, ticket_id: str) -> None:
        """No ticket of this id is opened here any more."""
        self._closed[ticket_id] = self._core.clock() + self._core.config.budget.first_token_s

    def allow(self, inbound: Inbound) -> None:
        """Its bytes may land from now on."""
        inbound.move(HandoffState.GRANTED, skip_blocks=inbound.cached_blocks)
        worker_id, epoch = inbound.writer
        self._core.send_transfer(t.Allow(ticket_id=inbound.ticket_id, worker_id=worker_id, epoch=epoch))
        inbound.move(HandoffState.RECEIVING)

    def keep(self, inbound: Inbound) -> None:
        """Everything is verified: the ticket lets nothing land any more."""
        inbound.move(HandoffState.COMMITTED)
        self.writers.remove(inbound)
        self._forbid(inbound)

    def revoke(self, inbound: Inbound, reason: str, fenced: bool) -> None:
        """End an open ticket. Unless ``fenced``, ``free`` is called for its sequence once nothing can land any more."""
        was_allowed = inbound.state is not HandoffState.REQUESTED
        inbound.move(HandoffState.REVOKED, reason=reason)
        self.tickets.pop(inbound.ticket_id, None)
        self.bury(inbound.ticket_id)
        self.writers.remove(inbound)
        if not fenced:
            inbound.move(HandoffState.QUARANTINED)
            self.writers.quarantine(inbound)
            return
        inbound.move(HandoffState.FREE)
        if was_allowed:
            self._forbid(inbound)

    def lease(self, request: worker_pb2.LeaseRequest) -> worker_pb2.LeaseReply:
        """Renews the writer's lease; a ticket that a list leaves out is over, and fenced by the writer."""
        self.writers.renew(request)
        tickets = self.tickets
        unknown = [x for x in request.ticket_ids if x not in tickets or tickets[x].state not in _KNOWN]
        return worker_pb2.LeaseReply(reader_epoch=self._core.registration.epoch, unknown_ticket_ids=unknown)

    def on_transfer(self, message: object) -> None:
        """Any message of the transfer child."""
        if isinstance(message, t.ListenerReady):
            self.writers.on_listener(message)
        elif isinstance(message, t.Verified):
            inbound = self.tickets.get(message.ticket_id)
            if inbound is not None and inbound.verified is not None and not inbound.verified.done():
                inbound.verified.set_result(message)
        elif isinstance(message, t.TicketClosed):
            if message.fenced:
                self.writers.vouch(message.ticket_id)
            else:
                self.writers.cannot_vouch(message.ticket_id, writer_says=False)
        elif isinstance(message, t.Fenced):
            self.writers.on_fenced((message.worker_id, message.epoch))

    def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _forbid(self, inbound: Inbound) -> None:
        worker_id, epoch = inbound.writer
        self._core.send_transfer(t.Revoke(ticket_id=inbound.ticket_id, worker_id=worker_id, epoch=epoch))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._core.clock()
            for ticket_id in [k for k, until in self._closed.items() if until < now]:
                del self._closed[ticket_id]
            self.writers.sweep()
