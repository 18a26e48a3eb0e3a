"""The writer's half of the hand-off: from the first chunk of a prompt to the release of its blocks.

    Submit ─► AddSequence ─► PrefillStarted ─► OpenSource, Reserve ─► Grant ─► OpenTicket ─► Pushed ─► Commit ─► release
                                                   └─ TicketLost ─► CloseTicket, report ─► Retarget ─► Reserve elsewhere

Computing never waits for the reader: the reserve is asked for when the first chunk is scheduled, and what was computed
before the grant came is pushed when it does. Blocks stay held until the reader has committed, or the ticket is fenced.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio

from kvstore.transfer import messages as t
from services.engine import messages as m
from services.prefill.push import Push
from services.prefill.ticket import Handoff
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.both import HandoffRole
from services.worker.handoff.ticket import Ticket, TicketLost
from services.worker.live import LiveRequest
from services.worker.times import stage_times
from services.worker.translate import to_error, to_logprobs, to_sequence

RETARGET_WAIT_S = 10.0
"""How long computed KV is kept for a router that may name another reader."""

_log = logging.getLogger("pdray.prefill")


class Writer(HandoffRole):
    name = "prefill"

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._handoffs: dict[str, Handoff] = {}  # by sequence id
        self._tickets, self._leases = self._outbox.tickets, self._outbox.leases

    # --- from the router ---

    async def submit(self, live: LiveRequest, reader: worker_pb2.Reader | None) -> None:
        if live.request.pools:
            self._core.send_engine(to_sequence(live, hand_off=False))
            self._core.emit_event(live, "queued", side="writer")
            return
        if reader is None:
            raise RequestError(ErrorCode.INTERNAL, "a prefill worker needs a reader to hand the KV to")
        self._handoffs[live.seq_id] = Handoff(live, reader, live.request.attempt)
        self._core.send_engine(to_sequence(live, hand_off=True, offered_blocks=self._puller.offer(live)))
        self._core.emit_event(live, "queued", side="writer")

    async def retarget(self, request: worker_pb2.RetargetRequest) -> None:
        live = self._core.requests.find(request.request_id)
        handoff = self._handoffs.get(live.seq_id) if live else None
        if handoff is None or request.attempt <= handoff.attempt:
            raise RequestError(
                ErrorCode.STALE, f"request {request.request_id} has no KV here for attempt {request.attempt}"
            )
        handoff.retarget.put_nowait(request)

    async def abort(self, live: LiveRequest, reason: str) -> None:
        if live.request.pools:
            self._core.send_engine(m.AbortSequence(seq_id=live.seq_id))
        handoff = self._handoffs.pop(live.seq_id, None)
        if handoff is not None and not self._puller.abort(live, reason):
            self._core.spawn(self._abandon(handoff, reason), "abandon")

    # --- from the children ---

    def on_engine(self, message: Any) -> None:
        if not isinstance(message, m.PrefillStarted):
            super().on_engine(message)
            return
        handoff = self._handoffs.get(message.seq_id)
        if handoff is None:
            return
        self._puller.forget(message.seq_id)
        handoff.block_ids = message.block_ids
        handoff.is_unreported = not self._core.transfer_up.is_set()
        self._core.send_transfer(
            t.OpenSource(seq_id=message.seq_id, block_ids=message.block_ids, ready_blocks=message.cached_blocks)
        )
        self._core.emit_event(handoff.live, "prefill_started", cached_blocks=message.cached_blocks)
        handoff.task = self._core.spawn(self._run(handoff), "hand-off")

    def on_output(self, live: LiveRequest, output: m.SequenceOutput) -> bool:
        handoff = self._handoffs.get(live.seq_id)
        now = self._core.clock()
        if handoff is None:
            if live.request.pools:
                self._core.emit_tokens(live, output, stage_times(live, output, now))
            return True
        if output.prompt_logprobs:
            self._core.emit_tokens(live, output, None)
            return False
        is_first = not handoff.first_tokens
        live.first_output_s = live.first_output_s or now
        total_ms = (now - live.accepted_s) * 1000
        compute_ms = min(output.compute_ms, total_ms)
        load_ms = min(live.kv_load_ms, total_ms - compute_ms)
        times = worker_pb2.StageTimes(
            queue_ms=total_ms - compute_ms - load_ms, kv_load_ms=load_ms, compute_ms=compute_ms
        )
        handoff.cached_tokens = output.cached_tokens
        self._core.emit_tokens(live, output, times)
        if is_first:
            self._core.emit_event(live, "prefill_done", cached_tokens=output.cached_tokens)
        handoff.first_tokens.update((output.choice, token_id) for token_id in output.token_ids)
        handoff.first_logprobs.update((output.choice, to_logprobs(told)) for told in output.logprobs)
        if len(handoff.first_tokens) == live.num_drawn:
            (handoff.drawn if live.open_choices else handoff.ended).set()
        return False  # `_run` closes it, after its ticket

    def on_transfer_lost(self) -> None:
        """A computed prompt can still be handed over; of one that is not, nobody knows which layers are done."""
        super().on_transfer_lost()
        error = RequestError(ErrorCode.TRANSFER_FAILED, "the transfer process ended while the prompt was computed")
        for handoff in list(self._handoffs.values()):
            if handoff.block_ids and not handoff.drawn.is_set() and not handoff.ended.is_set():
                self._core.spawn(self._core.fail(handoff.live, error), "fail")

    def on_transfer_restarted(self) -> None:
        super().on_transfer_restarted()
        for handoff in self._handoffs.values():
            if handoff.drawn.is_set():
                self._open_computed(handoff)

    # --- one hand-off ---

    async def _run(self, handoff: Handoff) -> None:
        """Until the KV is with a reader, or nobody wants it any more."""
        live = handoff.live
        try:
            while True:
                self._take_named(handoff)  # the first reader may have been lost while the request queued
                try:
                    await self._attempt(handoff)
                    break
                except TicketLost as exc:
                    await self._close_ticket(handoff, str(exc))
                    if not await self._ask_for_reader(handoff, exc.error):
                        await self._core.end(live, "no other reader was named")
                        return
        except TimeoutError:
            await self._core.fail(
                live, RequestError(ErrorCode.DEADLINE_EXCEEDED, "the hand-off did not end within the request's budget")
            )
            return
        self._finish(handoff)

    def _finish(self, handoff: Handoff) -> None:
        live = handoff.live
        self._handoffs.pop(live.seq_id, None)
        self._core.send_transfer(t.CloseSource(seq_id=live.seq_id))
        self._core.send_engine(m.ReleaseSequence(seq_id=live.seq_id))
        self._core.requests.close(live.seq_id)

    async def _attempt(self, handoff: Handoff) -> None:
        """One ticket, from reserve to commit; returns also where token 1 ended the request.

        Raises TicketLost, TimeoutError.
        """
        ticket = Ticket(self._core, handoff.live, handoff.reader, handoff.attempt)
        handoff.ticket = self._tickets[ticket.ticket_id] = ticket
        self._core.emit_event(handoff.live, "requested", side="writer", reader=ticket.reader.worker_id)
        async with asyncio.timeout(handoff.live.remaining_s(self._core.clock())):
            await self._core.transfer_up.wait()
            if handoff.is_unreported:
                await handoff.computed()
                self._open_computed(handoff)
            committed = await Push(self._core, self._peers, self._leases, handoff, ticket).run()
        if not committed:
            await self._close_ticket(handoff, "token 1 ended the request")
            return
        ticket.move(HandoffState.COMMITTED)
        self._leases.drop(ticket)
        self._tickets.pop(ticket.ticket_id, None)
        handoff.ticket = None
        self._report(handoff, "committed", ticket)

    def _open_computed(self, handoff: Handoff) -> None:
        """A source whose blocks are all computed."""
        blocks, handoff.is_unreported = handoff.block_ids, False
        self._core.send_transfer(t.OpenSource(seq_id=handoff.live.seq_id, block_ids=blocks, ready_blocks=len(blocks)))

    # --- ends ---

    async def _ask_for_reader(self, handoff: Handoff, error: RequestError) -> bool:
        """Report the loss, unless the router has seen it first; True once it has named another reader."""
        if not handoff.retarget.empty():
            return True
        self._report(handoff, "failed", None, error)
        if not error.status.retryable:
            return False
        wait_s = min(RETARGET_WAIT_S, handoff.live.remaining_s(self._core.clock()))
        try:
            async with asyncio.timeout(wait_s):
                self._go_to(handoff, await handoff.retarget.get())
        except TimeoutError:
            return False
        return True

    def _take_named(self, handoff: Handoff) -> None:
        """Of the readers that the router has named and nobody has taken yet, the latest."""
        while not handoff.retarget.empty():
            self._go_to(handoff, handoff.retarget.get_nowait())

    def _go_to(self, handoff: Handoff, request: worker_pb2.RetargetRequest) -> None:
        handoff.reader, handoff.attempt = request.reader, request.attempt
        handoff.live.request.attempt = request.attempt
        self._core.emit_event(handoff.live, "retargeted", reader=request.reader.worker_id)

    async def _close_ticket(self, handoff: Handoff, reason: str) -> None:
        """Stop and fence the open ticket, then tell the reader. The source's blocks are safe to reuse afterwards.

        It goes on to its end whoever is cancelled meanwhile; a second caller waits for the first one's.
        """
        ticket = handoff.ticket
        if ticket is None:
            return
        if ticket.closing is None:
            ticket.closing = self._core.spawn(self._close(handoff, ticket, reason), "close-ticket")
        await asyncio.shield(ticket.closing)

    async def _close(self, handoff: Handoff, ticket: Ticket, reason: str) -> None:
        ticket.move(HandoffState.REVOKED, reason=reason)
        if ticket.on_wire:
            ticket.move(HandoffState.QUARANTINED)
            ticket.is_confirmed = await self._outbox.fenced(ticket)
        ticket.move(HandoffState.FREE)
        self._tickets.pop(ticket.ticket_id, None)
        handoff.ticket = None
        if await self._tell_reader(ticket, reason) or ticket.is_confirmed:
            self._leases.drop(ticket)
        else:
            self._core.spawn(self._keep_telling(ticket, reason), "tell-reader")

    async def _tell_reader(self, ticket: Ticket, reason: str) -> bool:
        """True: the reader knows."""
        request = worker_pb2.CloseTicketRequest(
            ticket_id=ticket.ticket_id,
            request_id=ticket.live.request.request_id,
            attempt=ticket.attempt,
            reason=reason,
            fenced=ticket.is_confirmed,
            writer_epoch=self._core.registration.epoch,
        )
        try:
            reader = self._peers.stub(ticket.reader.address, ticket.reader.epoch)
            await reader.CloseTicket(request, timeout=2.0)
        except grpc.aio.AioRpcError as exc:
            _log.info("reader %s was not told of closed ticket %s: %s", ticket.peer[0], ticket.ticket_id, exc.code())
            return False
        return True

    async def _keep_telling(self, ticket: Ticket, reason: str) -> None:
        """Until the reader knows that it must fence, or its lease on us has lapsed, which makes it fence by itself.

        The ticket stays on our lists meanwhile: to be left out of them would mean that it is fenced.
        """
        try:
            for _ in range(3 * self._core.config.transfer.lease_ms // 1000 + 1):
                await asyncio.sleep(1.0)
                if await self._tell_reader(ticket, reason):
                    return
        finally:
            self._leases.drop(ticket)

    async def _abandon(self, handoff: Handoff, reason: str) -> None:
        """Nobody wants this request any more: stop computing it, fence what is on the wire, let its blocks go."""
        seq_id = handoff.live.seq_id
        if handoff.task is not None and handoff.task is not asyncio.current_task():
            handoff.task.cancel()
            await asyncio.wait([handoff.task], timeout=1)
        on_wire = handoff.ticket is not None and handoff.ticket.on_wire
        if on_wire:
            self._quarantines.hold(seq_id)
        self._core.send_engine(m.AbortSequence(seq_id=seq_id, quarantine=on_wire))
        await self._close_ticket(handoff, reason)
        if handoff.block_ids:
            self._core.send_transfer(t.CloseSource(seq_id=seq_id))
        if on_wire:
            self._quarantines.free(seq_id)

    def _report(self, handoff: Handoff, state: str, ticket: Ticket | None, error: RequestError | None = None) -> None:
        geometry = self._core.geometry
        self._core.hub.add_handoff(
            handoff.live.router,
            worker_pb2.HandoffReport(
                request_id=handoff.live.request.request_id,
                attempt=handoff.attempt,
                state=state,
                error=None if error is None else to_error(error),
                bytes=0 if ticket is None else ticket.num_bytes,
                layers=sum(g.num_layers for g in geometry.groups),
                transport=self._core.registration.transport if ticket is None else ticket.transport,
            ),
        )
