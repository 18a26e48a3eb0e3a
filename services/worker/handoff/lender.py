"""The holder's half of a pull: it has leading blocks of a prompt, and writes them to a peer that asks.

    Pull ─► PinBlocks ─► Pinned ─► OpenSource, OpenTicket ─► Pushed ─► PullReply ─┬─ EndPull ─► released
                                                                ▲                 └─ Pull(resend) ─┐
                                                                └──────────────────────────────────┘
    lost (lease, transfer process, the caller gave up) ─► CloseTicket ─► TicketClosed ─► released

Pinned blocks are used by nobody and evicted by nobody. They are released when nothing reads them any more; EndPull is
answered then, and says whether something of the ticket may still land at the reader.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvstore.errors import GeometryMismatch
from kvstore.geometry import KVGeometry
from kvstore.transfer import messages as t
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import check_fingerprint
from services.worker.handoff.outbox import Outbox
from services.worker.handoff.ticket import Ticket, TicketLost, lost
from services.worker.live import LiveRequest

PULL_ARROW = "pull_"
"""Before the names of a pull's arrows in the timeline; a hand-off of the same request has the bare ones."""


_log = logging.getLogger("pdray.worker.handoff")


class _Ended(Exception):
    """The reader wants no more of it; the text says why, none: everything arrived."""


@dataclass(frozen=True, slots=True)
class _Again:
    extents: tuple[t.Extent, ...]


@dataclass(slots=True)
class _Loan:
    """One pull on its holder."""

    ticket: Ticket
    seq_id: str  # of the pinned blocks
    request: worker_pb2.PullRequest
    geometry: dict[str, Any]  # the reader's
    reply: asyncio.Future[worker_pb2.PullReply]
    count: int = 0  # of the blocks asked for, leading ones
    pinned: asyncio.Future[m.Pinned] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    closed: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lender:
    """All pulls from one worker."""

    def __init__(self, core: WorkerCore, outbox: Outbox) -> None:
        self._core = core
        self._outbox = outbox
        self._loans: dict[str, _Loan] = {}
        self._ended: dict[str, tuple[bool, float]] = {}  # ticket id -> (fenced, when it may be forgotten)

    async def pull(self, request: worker_pb2.PullRequest) -> worker_pb2.PullReply:
        """Returns once the blocks are in the reader's memory, or none is here. Raises RequestError."""
        loan = self._again(request) if request.resend else self._begin(request)
        try:
            async with asyncio.timeout(request.remaining_ms / 1000):
                return await asyncio.shield(loan.reply)
        except TimeoutError:
            loan.ticket.lose("the reader's time for the pull is over")
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, "the blocks were not written in time") from None
        except asyncio.CancelledError:
            loan.ticket.lose("the reader gave up waiting")
            raise

    async def end(self, request: worker_pb2.EndPullRequest) -> worker_pb2.EndPullReply:
        """Answers once nothing reads the blocks any more; a ticket that was never seen leaves a tombstone."""
        self._check_epoch(request.holder_epoch)
        loan = self._loans.get(request.ticket_id)
        if loan is None:
            fenced, _ = self._ended.setdefault(request.ticket_id, (True, self._forget_at()))
            return worker_pb2.EndPullReply(fenced=fenced)
        loan.ticket.wire.put_nowait(_Ended(request.reason))
        return worker_pb2.EndPullReply(fenced=await asyncio.shield(loan.closed))

    def on_pinned(self, message: m.Pinned) -> None:
        for loan in self._loans.values():
            if loan.seq_id == message.seq_id and not loan.pinned.done():
                loan.pinned.set_result(message)

    # --- begin ---

    def _begin(self, request: worker_pb2.PullRequest) -> _Loan:
        core = self._core
        geometry = self._check(request)
        live = LiveRequest(
            worker_pb2.Request(
                request_id=request.request_id,
                attempt=request.attempt,
                router_id=request.router_id,
                router_epoch=request.router_epoch,
            ),
            accepted_s=core.clock(),
            deadline_s=core.clock() + request.remaining_ms / 1000,
        )
        reader = worker_pb2.Reader(
            worker_id=request.reader_id, epoch=request.reader_epoch, address=request.reader_address
        )
        ticket = Ticket(core, live, reader, request.attempt, request.ticket_id, prefix=PULL_ARROW)
        reply: asyncio.Future[worker_pb2.PullReply] = asyncio.get_running_loop().create_future()
        loan = self._loans[ticket.ticket_id] = _Loan(ticket, f"pull.{ticket.ticket_id}", request, geometry, reply)
        self._outbox.tickets[ticket.ticket_id] = ticket
        self._outbox.leases.add(ticket)
        core.emit_event(live, f"{PULL_ARROW}requested", side="writer", ticket=ticket.ticket_id)
        core.spawn(self._serve(loan), "lend")
        return loan

    def _again(self, request: worker_pb2.PullRequest) -> _Loan:
        loan = self._loans.get(request.ticket_id)
        if loan is None or loan.ticket.state is not HandoffState.VERIFYING:
            raise RequestError(ErrorCode.STALE, f"nothing of ticket {request.ticket_id} can be sent again")
        loan.reply = asyncio.get_running_loop().create_future()
        extents = (t.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in request.resend)
        loan.ticket.wire.put_nowait(_Again(tuple(extents)))
        return loan

    def _check(self, request: worker_pb2.PullRequest) -> dict[str, Any]:
        """Geometry of the reader. Raises RequestError."""
        ours = self._core.registration
        if self._core.draining:
            raise RequestError(ErrorCode.WORKER_LOST, f"worker {ours.worker_id} is draining")
        self._check_epoch(request.holder_epoch)
        check_fingerprint(ours.fingerprint, request.fingerprint)
        if request.transport != ours.transport:
            raise RequestError(
                ErrorCode.INCOMPATIBLE_WORKERS,
                f"reader and holder differ in transport: {request.transport!r} there, {ours.transport!r} here",
            )
        for ticket_id in [k for k, (_, until) in self._ended.items() if until < self._core.clock()]:
            del self._ended[ticket_id]
        if request.ticket_id in self._ended or request.ticket_id in self._loans:
            raise RequestError(ErrorCode.STALE, f"ticket {request.ticket_id} is over or open already")
        named, wanted = len(request.block_names) // 16, len(request.block_ids)
        if not wanted or named != request.first + wanted:
            raise RequestError(ErrorCode.INTERNAL, f"{named} block names for {wanted} blocks after {request.first}")
        try:
            return KVGeometry.from_dict(json.loads(request.geometry_json)).to_dict()
        except (GeometryMismatch, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise RequestError(ErrorCode.INTERNAL, f"the reader's geometry is unreadable: {exc}") from None

    def _check_epoch(self, epoch: str) -> None:
        ours = self._core.registration.epoch
        if epoch != ours:
            raise RequestError(ErrorCode.WORKER_LOST, f"this worker restarted: epoch {ours}, not {epoch}")

    # --- one loan ---

    async def _serve(self, loan: _Loan) -> None:
        """From the pin to the release of the blocks."""
        reason = "none of the blocks is here any more"
        try:
            if await self._pin(loan):
                await self._lend(loan)
            loan.reply.set_result(worker_pb2.PullReply())
        except _Ended as ended:
            reason = str(ended)
        except TicketLost as exc:
            reason = str(exc)
        except Exception:
            _log.exception("lending %s failed", loan.seq_id)  # a defect of ours, which must not keep the blocks
            reason = "the holder failed"
        await self._close(loan, reason)

    async def _pin(self, loan: _Loan) -> bool:
        """Whether some of the blocks asked for are here; they stay."""
        request = loan.request
        names = tuple(request.block_names[i : i + 16] for i in range(0, len(request.block_names), 16))
        self._core.send_engine(m.PinBlocks(seq_id=loan.seq_id, names=names))
        news = asyncio.ensure_future(self._next(loan))
        try:
            waits: list[asyncio.Future[Any]] = [loan.pinned, news]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                news.result()  # raises
        finally:
            news.cancel()
        block_ids = loan.pinned.result().block_ids[request.first :]
        loan.count = len(block_ids)
        if not block_ids:
            return False
        loan.ticket.move(HandoffState.GRANTED, blocks=loan.count)
        self._core.send_transfer(t.OpenSource(seq_id=loan.seq_id, block_ids=block_ids, ready_blocks=loan.count))
        return True

    async def _lend(self, loan: _Loan) -> NoReturn:
        """Push, answer, and push again what the reader found bad. Raises TicketLost, or _Ended at its end."""
        ticket, request = loan.ticket, loan.request
        ticket.on_wire = True
        self._core.send_transfer(
            t.OpenTicket(
                ticket_id=ticket.ticket_id,
                seq_id=loan.seq_id,
                worker_id=request.reader_id,
                epoch=request.reader_epoch,
                segment=request.segment,
                geometry=loan.geometry,
                block_ids=tuple(request.block_ids[: loan.count]),
                skip_blocks=0,
            )
        )
        ticket.move(HandoffState.RECEIVING)
        while True:
            message = await self._next(loan)
            if isinstance(message, _Again):
                ticket.move(HandoffState.RECEIVING, bad_extents=len(message.extents))
                self._core.send_transfer(t.Resend(ticket_id=ticket.ticket_id, extents=message.extents))
            else:
                ticket.num_bytes += message.num_bytes
                ticket.move(HandoffState.VERIFYING, bytes=message.num_bytes)
                loan.reply.set_result(_reply(loan, message))

    async def _next(self, loan: _Loan) -> t.Pushed | _Again:
        """What comes next for this ticket. Raises TicketLost, _Ended."""
        message = await loan.ticket.wire.get()
        if isinstance(message, t.PushFailed):
            raise lost(message.message)
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, t.Pushed | _Again)
        return message

    async def _close(self, loan: _Loan, reason: str) -> None:
        """Let go of the blocks as soon as nothing reads them."""
        ticket, core = loan.ticket, self._core
        if not reason and ticket.state is HandoffState.VERIFYING:
            ticket.move(HandoffState.COMMITTED)
        else:
            ticket.move(HandoffState.REVOKED, reason=reason)
            if ticket.on_wire:
                ticket.move(HandoffState.QUARANTINED)
                ticket.is_confirmed = await self._outbox.fenced(ticket)
            ticket.move(HandoffState.FREE)
        if not loan.reply.done():
            loan.reply.set_exception(RequestError(ErrorCode.TRANSFER_FAILED, reason or "the pull was ended"))
            loan.reply.exception()  # the caller may have left
        core.send_transfer(t.CloseSource(seq_id=loan.seq_id))
        core.send_engine(m.ReleaseSequence(seq_id=loan.seq_id))
        self._outbox.drop(ticket)
        del self._loans[ticket.ticket_id]
        self._ended[ticket.ticket_id] = (ticket.is_confirmed, self._forget_at())
        loan.closed.set_result(ticket.is_confirmed)

    def _forget_at(self) -> float:
        return self._core.clock() + self._core.config.budget.first_token_s


def _reply(loan: _Loan, pushed: t.Pushed) -> worker_pb2.PullReply:
    extents = [worker_pb2.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in pushed.extents]
    begun_s = min((x.submitted_s for x in pushed.layers), default=0.0)
    wire_ms = 1000 * (max((x.done_s for x in pushed.layers), default=0.0) - begun_s)
    return worker_pb2.PullReply(
        count=loan.count, extents=extents, bytes=loan.ticket.num_bytes, wire_ms=max(wire_ms, 0.0)
    )
