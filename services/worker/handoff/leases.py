"""The writer's end of leases: each second it names its open tickets to each reader, which names those it does not know.

A ticket is on the lists from before its Reserve until it is committed or fenced: absence means that nothing of it is on
the wire. Lists are numbered, and a Reserve names the last one that could not name its ticket: an older one that comes
late says nothing about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.ticket import Ticket
from services.worker.peers import Peers

IDLE_LISTS = 3
"""Times in a row that a reader has no ticket before nothing is renewed towards it any more."""


class LeaseKeeper:
    """Renews towards every reader that holds a ticket of ours; loses the tickets of one that does not answer.

    ``on_lapse``: (reader, reason): it did not answer for too long, its channel must be closed.
    """

    def __init__(self, core: WorkerCore, peers: Peers, on_lapse: Callable[[tuple[str, str], str], None]) -> None:
        self._core = core
        self._peers = peers
        self._on_lapse = on_lapse
        self._tickets: dict[tuple[str, str], dict[str, Ticket]] = {}
        self._renewed_s: dict[tuple[str, str], float] = {}
        self._loops: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.last_list = 0  # number of the last list that was made, to whomever

    def add(self, ticket: Ticket) -> None:
        mine = self._tickets.setdefault(ticket.peer, {})
        if not mine:
            self._renewed_s[ticket.peer] = self._core.clock()
        mine[ticket.ticket_id] = ticket
        if ticket.peer not in self._loops:
            self._loops[ticket.peer] = self._core.spawn(self._renew(ticket.peer), "lease")

    def drop(self, ticket: Ticket) -> None:
        self._tickets.get(ticket.peer, {}).pop(ticket.ticket_id, None)

    def lose(self, peer: tuple[str, str], reason: str) -> None:
        """Nothing goes to this reader any more: its open tickets are over."""
        for ticket in [x for x in self._tickets.get(peer, {}).values() if _is_held(x)]:
            ticket.lose(reason)

    async def _renew(self, peer: tuple[str, str]) -> None:
        renew_s = self._core.config.transfer.lease_renew_ms / 1000
        lease_s = self._core.config.transfer.lease_ms / 1000
        idle = 0
        try:
            while idle < IDLE_LISTS:
                if idle:  # nothing is awaited between a look that finds no ticket and the end
                    await asyncio.sleep(renew_s)
                tickets = self._tickets.get(peer, {})
                idle = 0 if tickets else idle + 1
                if tickets:
                    await self._ask(peer, dict(tickets), renew_s)
                    if not any(_is_held(x) for x in tickets.values()):
                        self._renewed_s[peer] = self._core.clock()  # a ticket that is not granted needs no lease
                    elif self._core.clock() - self._renewed_s[peer] > lease_s:
                        self._lapse(peer, lease_s)
                    await asyncio.sleep(renew_s)
        finally:
            self._loops.pop(peer, None)
            if not self._tickets.get(peer):
                self._tickets.pop(peer, None)

    async def _ask(self, peer: tuple[str, str], tickets: dict[str, Ticket], timeout_s: float) -> None:
        address = next(iter(tickets.values())).reader.address
        registration = self._core.registration
        self.last_list += 1
        request = worker_pb2.LeaseRequest(
            writer_id=registration.worker_id,
            writer_epoch=registration.epoch,
            ticket_ids=list(tickets),
            number=self.last_list,
            reader_epoch=peer[1],
        )
        granted = {k for k, v in tickets.items() if _is_held(v)}
        try:
            reply = await self._peers.stub(address, peer[1]).Lease(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return
        if reply.reader_epoch != peer[1]:
            for ticket in [x for x in tickets.values() if _is_held(x)]:
                ticket.lose(f"{peer[0]} restarted (epoch {reply.reader_epoch}, the ticket was for {peer[1]})")
            return
        self._renewed_s[peer] = self._core.clock()
        for ticket_id in set(reply.unknown_ticket_ids) & granted:
            tickets[ticket_id].lose(f"{peer[0]} revoked the ticket")

    def _lapse(self, peer: tuple[str, str], lease_s: float) -> None:
        self._renewed_s[peer] = self._core.clock()
        reason = f"the lease lapsed: {peer[0]} did not answer for {lease_s:.0f} s"
        self.lose(peer, reason)
        self._on_lapse(peer, reason)


def _is_held(ticket: Ticket) -> bool:
    """The reader holds blocks for it; before that its own Reserve tells how it goes on."""
    return ticket.state is not HandoffState.REQUESTED
