"""The writer's end of leases: each second it names its open tickets to each reader, which names those it does not know.

A ticket stays on the list until it is committed or fenced: absence means that nothing of it is on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from services.prefill.ticket import Ticket
from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.peers import Peers


class LeaseKeeper:
    """Renews towards every reader that holds a ticket of ours; loses the tickets of one that does not answer."""

    def __init__(self, core: WorkerCore, peers: Peers, on_fence: Callable[[tuple[str, str]], None]) -> None:
        self._core = core
        self._peers = peers
        self._on_fence = on_fence
        self._tickets: dict[tuple[str, str], dict[str, Ticket]] = {}
        self._renewed_s: dict[tuple[str, str], float] = {}
        self._loops: dict[tuple[str, str], asyncio.Task[None]] = {}

    def add(self, ticket: Ticket) -> None:
        mine = self._tickets.setdefault(ticket.peer, {})
        mine[ticket.ticket_id] = ticket
        if ticket.peer not in self._loops:
            self._renewed_s[ticket.peer] = self._core.clock()
            self._loops[ticket.peer] = self._core.spawn(self._renew(ticket.peer), "lease")

    def drop(self, ticket: Ticket) -> None:
        self._tickets.get(ticket.peer, {}).pop(ticket.ticket_id, None)

    async def _renew(self, peer: tuple[str, str]) -> None:
        renew_s = self._core.config.transfer.lease_renew_ms / 1000
        lease_s = self._core.config.transfer.lease_ms / 1000
        idle = 0
        try:
            while idle < 3:
                tickets = self._tickets.get(peer, {})
                idle = 0 if tickets else idle + 1
                if tickets:
                    await self._ask(peer, dict(tickets), renew_s)
                    if self._core.clock() - self._renewed_s[peer] > lease_s:
                        self._lapse(peer, lease_s)
                await asyncio.sleep(renew_s)
        finally:
            self._loops.pop(peer, None)
            if not self._tickets.get(peer):
                self._tickets.pop(peer, None)

    async def _ask(self, peer: tuple[str, str], tickets: dict[str, Ticket], timeout_s: float) -> None:
        address = next(iter(tickets.values())).reader.address
        registration = self._core.registration
        request = worker_pb2.LeaseRequest(
            writer_id=registration.worker_id, writer_epoch=registration.epoch, ticket_ids=list(tickets)
        )
        granted = {k for k, v in tickets.items() if v.state is not HandoffState.REQUESTED}
        try:
            reply = await self._peers.stub(address).Lease(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return
        if reply.reader_epoch != peer[1]:
            for ticket in tickets.values():
                ticket.lose(f"{peer[0]} restarted (epoch {reply.reader_epoch}, the ticket was for {peer[1]})")
            return
        self._renewed_s[peer] = self._core.clock()
        for ticket_id in set(reply.unknown_ticket_ids) & granted:
            tickets[ticket_id].lose(f"{peer[0]} revoked the ticket")

    def _lapse(self, peer: tuple[str, str], lease_s: float) -> None:
        self._renewed_s[peer] = self._core.clock()
        for ticket in list(self._tickets.get(peer, {}).values()):
            ticket.lose(f"the lease lapsed: {peer[0]} did not answer for {lease_s:.0f} s")
        self._on_fence(peer)
