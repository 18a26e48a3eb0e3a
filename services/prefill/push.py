"""One ticket on its way: reserve, push, commit.

Each wait also ends when token 1 ends every choice (then there is nothing to hand over), when the ticket is lost
(TicketLost), and with the request's budget, which the caller keeps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc.aio

from kvstore.transfer import messages as t
from services.prefill.ticket import Handoff
from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.leases import LeaseKeeper
from services.worker.handoff.ticket import Ticket, TicketLost, lost
from services.worker.peers import Peers
from services.worker.service import error_of

T = TypeVar("T")


class _Ended(Exception):
    """Token 1 ended every choice."""


class Push:
    def __init__(self, core: WorkerCore, peers: Peers, leases: LeaseKeeper, handoff: Handoff, ticket: Ticket) -> None:
        self._core = core
        self._leases = leases
        self._handoff = handoff
        self._ticket = ticket
        self._who = f"reader {ticket.reader.worker_id}"
        self._reader = peers.stub(ticket.reader.address, ticket.reader.epoch)

    async def run(self) -> bool:
        """True: the reader has verified everything and decodes. False: token 1 ended the request. Raises TicketLost."""
        try:
            grant = await self._unless_ended(self._reserve())
            self._open(grant)
            pushed = await self._unless_ended(self._pushed())
            await self._unless_ended(self._handoff.drawn.wait())
        except _Ended:
            return False
        bad = await self._commit(pushed)
        if bad and self._core.config.transfer.on_kv_failure != "ladder":
            raise lost(f"{len(bad)} extents arrived with a wrong digest")
        if bad:
            self._ticket.move(HandoffState.RECEIVING, bad_extents=len(bad))
            self._core.send_transfer(t.Resend(ticket_id=self._ticket.ticket_id, extents=bad))
            if await self._commit(await self._pushed()):
                raise lost("extents arrived with a wrong digest twice")
        return True

    async def _unless_ended(self, wait: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        task, ended = asyncio.ensure_future(wait), asyncio.ensure_future(self._handoff.ended.wait())
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Ended
            return task.result()
        finally:
            ended.cancel()
            task.cancel()

    async def _reserve(self) -> worker_pb2.Grant:
        registration, live = self._core.registration, self._handoff.live
        remaining_s = live.remaining_s(self._core.clock())
        request = worker_pb2.ReserveRequest(
            ticket_id=self._ticket.ticket_id,
            request=live.request,
            writer_id=registration.worker_id,
            writer_epoch=registration.epoch,
            writer_address=registration.address,
            reader_epoch=self._ticket.reader.epoch,
            fingerprint=registration.fingerprint,
            transport=registration.transport,
            spare_transports=registration.spare_transports,
            last_list=self._leases.last_list,
        )
        self._leases.add(self._ticket)
        request.request.remaining_ms = int(remaining_s * 1000)
        try:
            grant: worker_pb2.Grant = await self._reader.Reserve(request, timeout=remaining_s)
        except grpc.aio.AioRpcError as exc:
            raise TicketLost(error_of(exc, self._who)) from None
        return grant

    def _open(self, grant: worker_pb2.Grant) -> None:
        ticket, block_ids = self._ticket, self._handoff.block_ids
        if len(grant.block_ids) != len(block_ids):
            raise lost(f"the grant has {len(grant.block_ids)} blocks for {len(block_ids)} of the prompt")
        ticket.transport = grant.transport
        ticket.move(HandoffState.GRANTED, skip_blocks=grant.cached_blocks)
        ticket.on_wire = True
        self._core.send_transfer(
            t.OpenTicket(
                ticket_id=ticket.ticket_id,
                seq_id=self._handoff.live.seq_id,
                worker_id=ticket.reader.worker_id,
                epoch=ticket.reader.epoch,
                segment=grant.segment,
                geometry=json.loads(grant.geometry_json),
                block_ids=tuple(grant.block_ids),
                skip_blocks=grant.cached_blocks,
            )
        )
        ticket.move(HandoffState.RECEIVING)

    async def _pushed(self) -> t.Pushed:
        """The next Pushed of this ticket. Raises TicketLost."""
        ticket = self._ticket
        message = await ticket.wire.get()
        if isinstance(message, TicketLost):
            raise message
        if isinstance(message, t.PushFailed):
            raise lost(message.message)
        assert isinstance(message, t.Pushed)
        ticket.num_bytes += message.num_bytes
        self._core.emit_event(
            ticket.live,
            "pushed",
            side="writer",
            ticket=ticket.ticket_id,
            bytes=message.num_bytes,
            layers=_trace(message),
        )
        return message

    async def _commit(self, pushed: t.Pushed) -> tuple[t.Extent, ...]:
        """Extents that the reader found bad; none: it is committed. Raises TicketLost."""
        ticket, handoff = self._ticket, self._handoff
        ticket.move(HandoffState.VERIFYING)
        reply = await self._call_commit(
            worker_pb2.CommitRequest(
                ticket_id=ticket.ticket_id,
                request_id=handoff.live.request.request_id,
                attempt=ticket.attempt,
                first_tokens=[
                    worker_pb2.FirstToken(
                        choice=choice,
                        token_id=handoff.first_tokens[choice],
                        logprobs=handoff.first_logprobs.get(choice),
                    )
                    for choice in sorted(handoff.live.open_choices)
                ],
                extents=[
                    worker_pb2.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest)
                    for e in pushed.extents
                ],
                cached_tokens=handoff.cached_tokens,
                writer_epoch=self._core.registration.epoch,
            )
        )
        if reply.state == "committed":
            return ()
        if reply.state == "bad_extents":
            return tuple(t.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in reply.bad)
        raise lost(f"the reader revoked the ticket: {reply.reason}")

    async def _call_commit(self, request: worker_pb2.CommitRequest) -> worker_pb2.CommitReply:
        """Commit is idempotent, so one broken connection is tried once more."""
        for last in (False, True):
            timeout_s = self._handoff.live.remaining_s(self._core.clock())
            try:
                reply: worker_pb2.CommitReply = await self._reader.Commit(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as exc:
                if last or exc.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise TicketLost(error_of(exc, self._who)) from None
            else:
                return reply
        raise AssertionError("unreachable")


def _trace(pushed: t.Pushed) -> list[list[float]]:
    """[step, layer, computed, submitted, done (s, monotonic), bytes] for each layer of each chunk."""
    return [[x.step, x.layer, x.computed_s, x.submitted_s, x.done_s, x.num_bytes] for x in pushed.layers]
