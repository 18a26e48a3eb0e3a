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
from services.decode.verify import verify
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import OPEN_STATES, HandoffState
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.both import HandoffRole
from services.worker.handoff.inbound import Inbound, check_fingerprint
from services.worker.live import LiveRequest
from services.worker.times import stage_times
from services.worker.translate import from_logprobs, to_sequence

_log = logging.getLogger("pdray.decode")


class Reader(HandoffRole):
    """Role `decode`, and with ``takes_prompts`` role `mixed`."""

    def __init__(self, core: WorkerCore, *, takes_prompts: bool) -> None:
        self.name = "mixed" if takes_prompts else "decode"
        super().__init__(core)
        self._takes_prompts = takes_prompts
        self._tickets, self._writers = self._inbox.tickets, self._inbox.writers
        self._by_sequence: dict[str, Inbound] = {}

    # --- from routers ---

    async def submit(self, live: LiveRequest, reader: worker_pb2.Reader | None) -> None:
        if not self._takes_prompts and not live.computes_here:
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
        opened = self._inbox.open(inbound)
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
        if inbound.state is HandoffState.REQUESTED:
            return worker_pb2.CommitReply(state="revoked", reason="the ticket has no blocks here")
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
        self._inbox.bury(request.ticket_id)
        inbound = self._tickets.get(request.ticket_id)
        if inbound is not None and inbound.state in OPEN_STATES:
            self._core.requests.close(inbound.live.seq_id)
            self._by_sequence.pop(inbound.live.seq_id, None)
            self._revoke(inbound, request.reason, request.fenced)
        if request.fenced:
            self._writers.vouch(request.ticket_id)
        else:
            self._writers.cannot_vouch(request.ticket_id, writer_says=True)

    # --- from the children ---

    def on_engine(self, message: Any) -> None:
        if not isinstance(message, m.Reserved | m.ReserveRefused):
            super().on_engine(message)
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
        writer = (request.writer_id, request.writer_epoch)
        self._writers.check_open(writer)
        transport = core.choose_transport(request.transport, request.spare_transports)
        self._inbox.check_new(request.ticket_id)
        core.check_fits(request.request)
        live = core.requests.open(request.request)
        inbound = self._by_sequence[live.seq_id] = Inbound(core, live, request.ticket_id, writer, self._end_silently)
        inbound.last_list, inbound.transport = request.last_list, transport
        core.emit_event(live, "requested", side="reader", ticket=inbound.ticket_id)
        return inbound

    def _grant(self, inbound: Inbound, reserved: m.Reserved, listener: t.ListenerReady) -> worker_pb2.Grant:
        if not listener.segment:
            raise RequestError(ErrorCode.TRANSFER_FAILED, f"the reader's memory cannot be opened: {listener.error}")
        inbound.block_ids, inbound.cached_blocks = reserved.block_ids, reserved.cached_blocks
        self._inbox.allow(inbound)
        return worker_pb2.Grant(
            ticket_id=inbound.ticket_id,
            block_ids=reserved.block_ids,
            cached_blocks=reserved.cached_blocks,
            segment=listener.segment,
            transport=inbound.transport,
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
            inbound.resent, inbound.bad = True, frozenset((e.layer, e.block, e.count) for e in bad)
            inbound.move(HandoffState.RECEIVING, bad_extents=len(bad))
            return worker_pb2.CommitReply(state="bad_extents", bad=bad)
        self._inbox.keep(inbound)
        inbound.live.started_s = self._core.clock()
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
        if not inbound.reserved.done():
            inbound.reserved.set_exception(RequestError(ErrorCode.STALE, reason))
            inbound.reserved.exception()  # whoever waits has it; nobody may be left to
        if not fenced:
            self._quarantines.hold(inbound.live.seq_id)
        self._core.send_engine(m.AbortSequence(seq_id=inbound.live.seq_id, quarantine=not fenced))
        self._inbox.revoke(inbound, reason, fenced)

    def _forget(self, inbound: Inbound | None) -> None:
        if inbound is not None:
            self._tickets.pop(inbound.ticket_id, None)
            self._by_sequence.pop(inbound.live.seq_id, None)
