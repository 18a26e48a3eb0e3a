"""The tickets of one worker in both directions: it reads from some peers, writes to others, and to one both ways.

A peer that is fenced for good loses both ways at once, since the transfer process closes its channel and its listener;
so whichever side notices first that a lease has lapsed ends the tickets of the other side, too.
"""

from __future__ import annotations

from typing import Any

from services.engine import messages as m
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbox import Inbox
from services.worker.handoff.lender import Lender
from services.worker.handoff.outbox import Outbox
from services.worker.handoff.puller import Puller
from services.worker.handoff.quarantines import Quarantines
from services.worker.peers import Peers
from services.worker.role import Role


class HandoffRole(Role):
    """A role whose worker has tickets: it lends what it holds to whoever asks, and pulls what it is told to."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._peers = Peers(core.config.secret)
        self._quarantines = Quarantines(core)
        self._inbox = Inbox(core, self._quarantines.free, self._writer_lapsed)
        self._outbox = Outbox(core, self._peers, self._reader_lapsed)
        self._lender = Lender(core, self._outbox)
        self._puller = Puller(core, self._peers, self._inbox, self._quarantines)

    async def pull(self, request: worker_pb2.PullRequest) -> worker_pb2.PullReply:
        return await self._lender.pull(request)

    async def end_pull(self, request: worker_pb2.EndPullRequest) -> worker_pb2.EndPullReply:
        return await self._lender.end(request)

    def lease(self, request: worker_pb2.LeaseRequest) -> worker_pb2.LeaseReply:
        return self._inbox.lease(request)

    def on_engine(self, message: Any) -> None:
        if isinstance(message, m.Pinned):
            self._lender.on_pinned(message)
        elif isinstance(message, m.LoadWanted):
            self._puller.on_load_wanted(message)

    def on_transfer(self, message: Any) -> None:
        self._inbox.on_transfer(message)
        self._outbox.on_transfer(message)

    def on_transfer_lost(self) -> None:
        reason = "the transfer process ended"
        self._inbox.writers.lose_all(reason)
        self._outbox.on_transfer_lost()

    def on_transfer_restarted(self) -> None:
        self._inbox.writers.reopen()

    async def stop(self) -> None:
        self._inbox.stop()
        await self._peers.close()

    def _writer_lapsed(self, peer: tuple[str, str], reason: str) -> None:
        self._outbox.leases.lose(peer, reason)

    def _reader_lapsed(self, peer: tuple[str, str], reason: str) -> None:
        self._inbox.writers.lapse(peer, reason)
