"""The reader's half of the hand-off: holds blocks, lets one writer fill them, verifies, decodes.

    Reserve ─► ReserveSequence ─► Reserved ─► Allow ─► Grant … Commit ─► Verify ─► StartSequence ─► decoding
                                                └─ abort | lease lapsed | not on two lists ─► quarantine ─► free

Blocks of a ticket that ends before its commit are reused only when nothing can land in them any more: the writer says
so (CloseTicket with ``fenced``, or its lists no longer name the ticket), the transport can tell (`Revoke`), or this
side has closed its memory to that writer (`Fence`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from kvstore.transfer import messages as t
from services.decode.inbound import Inbound, check_fingerprint, stage_times
from services.decode.verify import verify
from services.decode.writers import SWEEP_S, Writers
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import OPEN_STATES, HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.live import LiveRequest
from services.worker.role import Role
from services.worker.translate import from_logprobs, to_sequence

_log = logging.getLogger("pdray.decode")


class Reader(Role):
    """Role `decode`, and with ``takes_prompts`` role `mixed`."""

    def __init__(self, core: WorkerCore, *, takes_prompts: bool) -> None:
        self.name = "mixed" if takes_prompts else "decode"
        self._core = core
        self._takes_prompts = takes_prompts
        self._tickets: dict[str, Inbound] = {}  # open and committed ones, while their request lives
        self._by_sequence: dict[str, Inbound] = {}
        self._writers = Writers(core, self._end_silently)
        self._closed: dict[str, float] = {}  # tombstones: ticket id -> when it may be forgotten
        self._sweeper: asyncio.Task[None] | None = None

    # --- from routers ---

    async def submit(self, live: LiveRequest, reader: worker_pb2.Reader | None) -> None:
        if not self._takes_prompts:
            raise self._refuse("take prompts from the router")
        if reader is not None:
            raise self._refuse("hand KV to others")
        self._core.send_engine(to_sequence(live, hand_off=False))
        self._core.emit_event(live, "queued", side="reader")

    async def abort(self, live: LiveRequest, reason: str) -> None:
        inbound = self._by_sequence.pop(live.seq_id, None)
        if inbound is None or inbound.state is HandoffState.COMMITTED:
            self._forget(inbound)
            self._core.send_engine(m.AbortSequence(seq_id=live.seq_id))
        else:
            self._revoke(inbound, reason)

    def drop_choice(self, live: LiveRequest, choice: int) -> None:
        self._core.send_engine(m.AbortSequence(seq_id=live.seq_id, choice=choice))

    # --- from a writer ---

    async def reserve(self, request: worker_pb2.ReserveRequest) -> worker_pb2.Grant:
        """Hold blocks as soon as there are any; the caller's deadline and cancellation end the wait."""
        inbound = self._admit(request)
        if self._sweeper is None:
            self._sweeper = self._core.spawn(self._sweep(), "leases")
        opened = self._writers.add(inbound)
        self._core.send_engine(
            m.ReserveSequence(sequence=to_sequence(inbound.live, hand_off=False, tells_prompt=False))
        )
        try:
            async with asyncio.timeout(inbound.live.remaining_s(self._core.clock())):
                listener, reserved = await asyncio.gather(asyncio.shield(opened), inbound.reserved)
        except TimeoutError:
            raise await self._drop(
                inbound,
                RequestError(ErrorCode.DEADLINE_EXCEEDED, "no KV blocks became free within the request's budget"),
            ) from None
        except asyncio.CancelledError:
            await self._drop(inbound, RequestError(ErrorCode.CANCELLED, "the writer gave up waiting for blocks"))
            raise
        except RequestError as exc:
            raise await self._drop(inbound, exc) from None
        if inbound.state is not HandoffState.REQUESTED:
            raise RequestError(ErrorCode.STALE, "the ticket was closed while it waited for blocks")
        return self._grant(inbound, reserved, listener)

    async def commit(self, request: worker_pb2.CommitRequest) -> worker_pb2.CommitReply:
        """Verify what landed and start to decode. Idempotent: a second call gives the first one's answer."""
        inbound = self._tickets.get(request.ticket_id)
        if inbound is None or inbound.live.request.attempt != request.attempt:
            return worker_pb2.CommitReply(state="revoked", reason="the ticket is not open here")
        if inbound.state is HandoffState.COMMITTED:
            return worker_pb2.CommitReply(state="committed")
        if inbound.commit is None:
            inbound.commit = asyncio.create_task(self._commit(inbound, request), name="commit")
        task = inbound.commit
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and inbound.commit is task:
                inbound.commit = None

    async def close_ticket(self, request: worker_pb2.CloseTicketRequest) -> None:
        """The writer is done with a ticket; one that was never seen leaves a tombstone."""
        self._closed[request.ticket_id] = self._core.clock() + self._core.config.budget.first_token_s
        inbound = self._tickets.get(request.ticket_id)
        if inbound is not None and inbound.state in OPEN_STATES:
            self._core.requests.close(inbound.live.seq_id)
            self._by_sequence.pop(inbound.live.seq_id, None)
            self._revoke(inbound, request.reason, request.fenced)
        if request.fenced:
            self._writers.vouch(request.ticket_id)
        else:
            self._writers.cannot_vouch(request.ticket_id, writer_says=True)

    def lease(self, request: worker_pb2.LeaseRequest) -> worker_pb2.LeaseReply:
        """Renews the writer's lease; a ticket that two lists in a row leave out is over, and fenced by the writer."""
        self._writers.renew(request)
        unknown = [x for x in request.ticket_ids if x not in self._tickets or self._tickets[x].state not in _KNOWN]
        return worker_pb2.LeaseReply(reader_epoch=self._core.registration.epoch, unknown_ticket_ids=unknown)

    # --- from the children ---

    def on_engine(self, message: Any) -> None:
        if not isinstance(message, m.Reserved | m.ReserveRefused):
            return
        inbound = self._by_sequence.get(message.seq_id)
        if inbound is None or inbound.reserved.done():
            return
        if isinstance(message, m.Reserved):
            inbound.reserved.set_result(message)
        else:
            inbound.reserved.set_exception(RequestError(ErrorCode(message.code), message.message))

    def on_output(self, live: LiveRequest, output: m.SequenceOutput) -> bool:
        inbound = self._by_sequence.get(live.seq_id)
        now = self._core.clock()
        if not live.first_output_s and output.token_ids:
            live.first_output_s = now
        self._core.emit_tokens(live, output, stage_times(live, output, now))
        if live.open_choices:
            return False
        self._forget(inbound)
        return True

    def on_transfer(self, message: Any) -> None:
        if isinstance(message, t.ListenerReady):
            self._writers.on_listener(message)
        elif isinstance(message, t.Verified):
            inbound = self._tickets.get(message.ticket_id)
            if inbound is not None and inbound.verified is not None and not inbound.verified.done():
                inbound.verified.set_result(message)
        elif isinstance(message, t.TicketClosed):
            if message.fenced:
                self._writers.vouch(message.ticket_id)
            else:
                self._writers.cannot_vouch(message.ticket_id, writer_says=False)
        elif isinstance(message, t.Fenced):
            self._writers.on_fenced((message.worker_id, message.epoch))

    def on_transfer_lost(self) -> None:
        self._writers.lose_all("the transfer process ended")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()

    # --- reserve ---

    def _admit(self, request: worker_pb2.ReserveRequest) -> Inbound:
        core = self._core
        if core.draining:
            raise RequestError(ErrorCode.WORKER_LOST, f"worker {core.registration.worker_id} is draining")
        if request.reader_epoch != core.registration.epoch:
            raise RequestError(
                ErrorCode.WORKER_LOST,
                f"this worker restarted: epoch {core.registration.epoch}, not {request.reader_epoch}",
            )
        check_fingerprint(core.registration.fingerprint, request.fingerprint)
        self._writers.check_open((request.writer_id, request.writer_epoch))
        if request.transport != core.registration.transport:
            raise RequestError(
                ErrorCode.INCOMPATIBLE_WORKERS,
                f"prefill and decode worker differ in transport: {request.transport!r} there, "
                f"{core.registration.transport!r} here",
            )
        if request.ticket_id in self._closed or request.ticket_id in self._tickets:
            raise RequestError(ErrorCode.STALE, f"ticket {request.ticket_id} is closed or open already")
        core.check_fits(request.request)
        live = core.requests.open(request.request)
        inbound = Inbound(core, live, request.ticket_id, (request.writer_id, request.writer_epoch))
        self._tickets[inbound.ticket_id] = self._by_sequence[live.seq_id] = inbound
        core.emit_event(live, "requested", side="reader", ticket=inbound.ticket_id)
        return inbound

    def _grant(self, inbound: Inbound, reserved: m.Reserved, listener: t.ListenerReady) -> worker_pb2.Grant:
        if not listener.segment:
            raise RequestError(ErrorCode.TRANSFER_FAILED, f"the reader's memory cannot be opened: {listener.error}")
        inbound.block_ids, inbound.cached_blocks = reserved.block_ids, reserved.cached_blocks
        inbound.move(HandoffState.GRANTED, skip_blocks=reserved.cached_blocks)
        self._core.send_transfer(
            t.Allow(ticket_id=inbound.ticket_id, worker_id=inbound.writer[0], epoch=inbound.writer[1])
        )
        inbound.move(HandoffState.RECEIVING)
        return worker_pb2.Grant(
            ticket_id=inbound.ticket_id,
            block_ids=reserved.block_ids,
            cached_blocks=reserved.cached_blocks,
            segment=listener.segment,
            lease_ms=self._core.config.transfer.lease_ms,
            geometry_json=json.dumps(self._core.geometry.to_dict()),
        )

    async def _drop(self, inbound: Inbound, error: RequestError) -> RequestError:
        """Undo a reserve that was never granted; nothing can be on the wire."""
        if inbound.state is HandoffState.REQUESTED:
            self._end_silently(inbound, error.message, True)
        return error

    # --- commit ---

    async def _commit(self, inbound: Inbound, request: worker_pb2.CommitRequest) -> worker_pb2.CommitReply:
        inbound.move(HandoffState.VERIFYING)
        bad = await verify(self._core, inbound, request)
        if inbound.state is not HandoffState.VERIFYING:
            return worker_pb2.CommitReply(state="revoked", reason="the ticket ended while it was verified")
        if isinstance(bad, str):
            self._end_silently(inbound, bad, False)
            return worker_pb2.CommitReply(state="revoked", reason=bad)
        if bad:
            inbound.resent = True
            inbound.move(HandoffState.RECEIVING, bad_extents=len(bad))
            return worker_pb2.CommitReply(state="bad_extents", bad=bad)
        inbound.move(HandoffState.COMMITTED)
        inbound.live.started_s = self._core.clock()
        self._writers.remove(inbound)
        self._core.send_transfer(
            t.Revoke(ticket_id=inbound.ticket_id, worker_id=inbound.writer[0], epoch=inbound.writer[1])
        )
        await self._start(inbound.live, request.first_tokens)
        return worker_pb2.CommitReply(state="committed")

    async def _start(self, live: LiveRequest, first_tokens: Sequence[worker_pb2.FirstToken]) -> None:
        """Decode the choices that did not end with token 1, and were not dropped here before it came."""
        live.open_choices &= {x.choice for x in first_tokens}
        if going_on := [x for x in first_tokens if x.choice in live.open_choices]:
            told = [(x.choice, from_logprobs(x.logprobs)) for x in going_on if x.HasField("logprobs")]
            self._core.send_engine(
                m.StartSequence(
                    seq_id=live.seq_id,
                    first_tokens=tuple((x.choice, x.token_id) for x in going_on),
                    first_logprobs=tuple(told),
                )
            )
        else:
            await self._core.end(live, "no choice goes on")

    # --- ends ---

    def _end_silently(self, inbound: Inbound, reason: str, fenced: bool) -> None:
        """The ticket ends; its writer, not this worker, tells the router."""
        self._core.requests.close(inbound.live.seq_id)
        self._by_sequence.pop(inbound.live.seq_id, None)
        self._revoke(inbound, reason, fenced)

    def _revoke(self, inbound: Inbound, reason: str, fenced: bool = False) -> None:
        if inbound.state not in OPEN_STATES:
            return
        fenced = fenced or inbound.state is HandoffState.REQUESTED
        inbound.move(HandoffState.REVOKED, reason=reason)
        self._tickets.pop(inbound.ticket_id, None)
        self._closed[inbound.ticket_id] = self._core.clock() + self._core.config.budget.first_token_s
        if not inbound.reserved.done():
            inbound.reserved.set_exception(RequestError(ErrorCode.STALE, reason))
            inbound.reserved.exception()  # whoever waits has it; nobody may be left to
        self._writers.remove(inbound)
        self._core.send_engine(m.AbortSequence(seq_id=inbound.live.seq_id, quarantine=not fenced))
        if fenced:
            inbound.move(HandoffState.FREE)
            return
        inbound.move(HandoffState.QUARANTINED)
        self._writers.quarantine(inbound)

    def _forget(self, inbound: Inbound | None) -> None:
        if inbound is not None:
            self._tickets.pop(inbound.ticket_id, None)
            self._by_sequence.pop(inbound.live.seq_id, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._core.clock()
            for ticket_id in [k for k, until in self._closed.items() if until < now]:
                del self._closed[ticket_id]
            self._writers.sweep()


_KNOWN = OPEN_STATES | {HandoffState.COMMITTED}
