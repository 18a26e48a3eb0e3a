"""The reader's half of a pull: leading blocks of a prompt come from a worker that has them, the rest is computed.

    Submit(source) ─► AddSequence(offered) ─► LoadWanted ─► OpenListener ─► Allow, Pull ─► PullReply ─► Verify ─► Loaded
                                                                  └─ bad extents: Pull(resend), once ─┘
    time spent, holder lost, bad twice ─► Loaded(0, quarantine) ─► EndPull, Revoke ─► fenced ─► Unquarantine
    request over ─────────────────────► AbortSequence(quarantine) ─┘

A pull only saves computing: whatever goes wrong, the prompt is computed, and the client never hears of it. Its blocks
are reused when the holder or the transport vouches for the ticket, or our memory has been closed to the holder. The
holder's lists vouch for nothing here, since a Pull may still be on its way to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.engine import messages as m
from services.protocol.errors import RequestError
from services.protocol.handoff import OPEN_STATES, HandoffState
from services.protocol.proto import worker_pb2
from services.protocol.status import sent_error
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import Inbound, check_coverage
from services.worker.handoff.inbox import Inbox
from services.worker.handoff.lender import PULL_ARROW
from services.worker.handoff.outbox import CLOSE_WAIT_S
from services.worker.handoff.quarantines import Quarantines
from services.worker.handoff.verify import find_bad
from services.worker.live import LiveRequest
from services.worker.peers import Peers
from services.worker.service import error_of

_log = logging.getLogger("pdray.worker.handoff")


class _PullFailed(Exception):
    """Nothing is loaded. ``nothing_sent``: the holder said that it writes nothing."""

    def __init__(self, message: str, *, nothing_sent: bool = False) -> None:
        super().__init__(message)
        self.nothing_sent = nothing_sent


@dataclass(slots=True)
class _Pull:
    """One pull on its reader."""

    live: LiveRequest
    source: worker_pb2.Source
    inbound: Inbound
    first: int  # index of the first block wanted
    started_s: float
    num_bytes: int = 0
    wire_ms: float = 0.0
    task: asyncio.Task[None] | None = None


class Puller:
    """All pulls to one worker."""

    def __init__(self, core: WorkerCore, peers: Peers, inbox: Inbox, quarantines: Quarantines) -> None:
        self._core = core
        self._peers = peers
        self._inbox = inbox
        self._quarantines = quarantines
        self._offers: dict[str, LiveRequest] = {}  # by sequence id, until the engine wants them or the request is over
        self._pulls: dict[str, _Pull] = {}

    def offer(self, live: LiveRequest) -> int:
        """Leading blocks that a peer could write for this request; 0 where there is none."""
        if live.source is None or live.source.worker_id == self._core.registration.worker_id:
            return 0
        self._offers[live.seq_id] = live
        return min(live.source.blocks, len(live.request.block_names) // 16)

    def on_load_wanted(self, message: m.LoadWanted) -> None:
        live = self._offers.pop(message.seq_id, None)
        if live is None or live.source is None or message.count < 1:
            self._core.send_engine(m.Loaded(seq_id=message.seq_id, count=0))
            return
        source, core = live.source, self._core
        inbound = Inbound(
            core,
            live,
            secrets.token_hex(8),
            (source.worker_id, source.epoch),
            self._on_end,
            trusts_lists=False,
            prefix=PULL_ARROW,
            block_ids=message.block_ids[message.first : message.first + message.count],
        )
        pull = self._pulls[live.seq_id] = _Pull(live, source, inbound, message.first, core.clock())
        core.pulls += 1
        detail = {"ticket": inbound.ticket_id, "holder": source.worker_id, "blocks": message.count}
        core.emit_event(live, f"{PULL_ARROW}requested", side="reader", **detail)
        pull.task = core.spawn(self._run(pull), "pull")

    def forget(self, seq_id: str) -> None:
        """The offer is of no use any more."""
        self._offers.pop(seq_id, None)

    def abort(self, live: LiveRequest, reason: str) -> bool:
        """The request is over. True where it waited for a pull: then the engine has been told."""
        self._offers.pop(live.seq_id, None)
        pull = self._pulls.pop(live.seq_id, None)
        if pull is None:
            return False
        if pull.task is not None and pull.task is not asyncio.current_task():
            pull.task.cancel()
        quarantine = self._revoke(pull, reason, nothing_sent=False)
        self._core.send_engine(m.AbortSequence(seq_id=live.seq_id, quarantine=quarantine))
        return True

    # --- one pull ---

    async def _run(self, pull: _Pull) -> None:
        limit_s = min(self._core.config.transfer.pull_ms / 1000, pull.live.remaining_s(self._core.clock()))
        try:
            async with asyncio.timeout(limit_s):
                count = await self._load(pull)
        except _PullFailed as exc:
            self._fail(pull, str(exc), nothing_sent=exc.nothing_sent)
        except RequestError as exc:
            self._fail(pull, exc.message)
        except grpc.aio.AioRpcError as exc:
            self._fail(pull, error_of(exc, f"holder {pull.source.worker_id}").message)
        except TimeoutError:
            self._fail(pull, f"it took longer than {limit_s:g} s (transfer.pull_ms)")
        else:
            self._finish(pull, count)

    async def _load(self, pull: _Pull) -> int:
        """Blocks that are here and verified. Raises _PullFailed, RequestError, AioRpcError, TimeoutError."""
        core, inbound = self._core, pull.inbound
        await core.transfer_up.wait()
        listener = await asyncio.shield(self._inbox.open(inbound))
        if not listener.segment:
            raise _PullFailed(f"this worker's memory cannot be opened: {listener.error}")
        self._inbox.allow(inbound)
        stub = self._peers.stub(pull.source.address, pull.source.epoch)
        reply = await stub.Pull(self._request(pull, listener.segment), timeout=self._left_s(pull))
        count, pull.num_bytes, pull.wire_ms = reply.count, reply.bytes, reply.wire_ms
        if not count:
            raise _PullFailed("the holder has none of the blocks any more", nothing_sent=True)
        if count > len(inbound.block_ids):
            raise _PullFailed(f"{count} blocks came, {len(inbound.block_ids)} were wanted")
        if wrong := check_coverage(core.geometry, inbound.block_ids[:count], reply.extents):
            raise _PullFailed(f"the reply does not cover {count} blocks: {wrong}")
        inbound.move(HandoffState.VERIFYING)
        if bad := await find_bad(core, inbound, reply.extents):
            inbound.move(HandoffState.RECEIVING, bad_extents=len(bad))
            inbound.resent = True
            again = await stub.Pull(self._request(pull, listener.segment, bad), timeout=self._left_s(pull))
            pull.num_bytes = again.bytes
            if _spans(again.extents) != _spans(bad):
                raise _PullFailed("other extents came again than those that were bad")
            inbound.move(HandoffState.VERIFYING)
            if bad := await find_bad(core, inbound, again.extents):
                raise _PullFailed(f"{len(bad)} extents have a wrong digest after they were sent again")
        return int(count)

    def _request(self, pull: _Pull, segment: str, resend: Sequence[worker_pb2.Extent] = ()) -> worker_pb2.PullRequest:
        ours, request, inbound = self._core.registration, pull.live.request, pull.inbound
        num_named = pull.first + len(inbound.block_ids)
        return worker_pb2.PullRequest(
            ticket_id=inbound.ticket_id,
            request_id=request.request_id,
            attempt=request.attempt,
            router_id=request.router_id,
            router_epoch=request.router_epoch,
            reader_id=ours.worker_id,
            reader_epoch=ours.epoch,
            reader_address=ours.address,
            holder_epoch=pull.source.epoch,
            fingerprint=ours.fingerprint,
            transport=ours.transport,
            block_names=request.block_names[: 16 * num_named],
            first=pull.first,
            block_ids=inbound.block_ids,
            segment=segment,
            geometry_json=json.dumps(self._core.geometry.to_dict()),
            remaining_ms=int(1000 * self._left_s(pull)),
            resend=resend,
        )

    def _left_s(self, pull: _Pull) -> float:
        spent_s = self._core.clock() - pull.started_s
        return max(0.001, self._core.config.transfer.pull_ms / 1000 - spent_s)

    # --- ends ---

    def _finish(self, pull: _Pull, count: int) -> None:
        """All writes of the ticket are done and verified, so nothing is left to land."""
        core, seq_id = self._core, pull.live.seq_id
        self._take(pull)
        self._inbox.keep(pull.inbound)
        core.pulled_blocks += count
        pull.live.kv_load_ms += (core.clock() - pull.started_s) * 1000
        core.emit_event(pull.live, "pulled", holder=pull.source.worker_id, blocks=count, bytes=pull.num_bytes)
        if not pull.inbound.resent:
            self._report(pull, pull.num_bytes)
        core.send_engine(m.Loaded(seq_id=seq_id, count=count))
        core.spawn(self._tell_holder(pull, ""), "end-pull")

    def _fail(self, pull: _Pull, reason: str, *, nothing_sent: bool = False) -> None:
        """The prompt is computed; its blocks are other ones where a write may still land in these."""
        if not self._take(pull):
            return
        core = self._core
        core.pulls_failed += 1
        pull.live.kv_load_ms += (core.clock() - pull.started_s) * 1000
        _log.info("pull of %s from %s failed: %s", pull.live.seq_id, pull.source.worker_id, reason)
        if not nothing_sent:
            self._report(pull, 0)
        quarantine = self._revoke(pull, reason, nothing_sent=nothing_sent)
        core.send_engine(m.Loaded(seq_id=pull.live.seq_id, count=0, quarantine=quarantine))

    def _report(self, pull: _Pull, num_bytes: int) -> None:
        report = worker_pb2.PullReport(holder_id=pull.source.worker_id, bytes=num_bytes, wire_ms=pull.wire_ms)
        self._core.hub.add_pull(pull.live.router, report)

    def _on_end(self, inbound: Inbound, reason: str, _fenced: bool) -> None:
        """The holder is lost, or the transfer process: called while the ticket is open."""
        pull = self._pulls.get(inbound.live.seq_id)
        if pull is None or pull.inbound is not inbound:
            return
        if pull.task is not None:
            pull.task.cancel()
        self._fail(pull, reason)

    def _take(self, pull: _Pull) -> bool:
        """False where the pull is over already."""
        if self._pulls.get(pull.live.seq_id) is not pull:
            return False
        del self._pulls[pull.live.seq_id]
        return True

    def _revoke(self, pull: _Pull, reason: str, *, nothing_sent: bool) -> bool:
        """End the ticket; True where its blocks are quarantined."""
        inbound = pull.inbound
        if inbound.ticket_id not in self._inbox.tickets or inbound.state not in OPEN_STATES:
            return False  # it was never let in
        was_asked = inbound.state is not HandoffState.REQUESTED
        quarantine = was_asked and not nothing_sent
        if quarantine:
            self._quarantines.hold(pull.live.seq_id)
        self._inbox.revoke(inbound, reason, fenced=not quarantine)
        if was_asked:
            self._core.spawn(self._tell_holder(pull, reason), "end-pull")
        return quarantine

    async def _tell_holder(self, pull: _Pull, reason: str) -> None:
        """Until the holder has let go, or has had its chance; what it says vouches for the ticket."""
        inbound, writers = pull.inbound, self._inbox.writers
        request = worker_pb2.EndPullRequest(ticket_id=inbound.ticket_id, reason=reason, holder_epoch=pull.source.epoch)
        stub: Any = self._peers.stub(pull.source.address, pull.source.epoch)
        for _ in range(1 + 2 * self._core.config.transfer.lease_ms // 1000):
            try:
                reply = await stub.EndPull(request, timeout=CLOSE_WAIT_S + 1)
            except grpc.aio.AioRpcError as exc:
                if sent_error(exc) is not None:
                    break  # another process answers there, which cannot speak for it
            else:
                if not reply.fenced:
                    break
                writers.vouch(inbound.ticket_id)
            if inbound.state is not HandoffState.QUARANTINED:
                self._inbox.tickets.pop(inbound.ticket_id, None)
                return
            await asyncio.sleep(1.0)
        self._inbox.tickets.pop(inbound.ticket_id, None)
        writers.cannot_vouch(inbound.ticket_id, writer_says=True)


def _spans(extents: Sequence[worker_pb2.Extent]) -> set[tuple[int, int, int]]:
    return {(e.layer, e.block, e.count) for e in extents}
