"""What a role adds to a worker: its half of the hand-off. A verb that a role does not have refuses, naming the role."""

from __future__ import annotations

from typing import Any

from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.worker.live import LiveRequest


class Role:
    """Called on the event loop by `services.worker.core.WorkerCore`; handlers of messages must not block."""

    name = ""

    def _refuse(self, verb: str) -> RequestError:
        return RequestError(ErrorCode.INTERNAL, f"a {self.name} worker does not {verb}")

    # From the router.
    async def submit(self, live: LiveRequest, reader: worker_pb2.Reader | None) -> None:
        raise self._refuse("take requests from the router")

    async def retarget(self, request: worker_pb2.RetargetRequest) -> None:
        raise self._refuse("retarget")

    async def abort(self, live: LiveRequest, reason: str) -> None:
        """End one attempt in any state; returns at once, what must wait for a fence goes on behind."""
        raise NotImplementedError

    def drop_choice(self, live: LiveRequest, choice: int) -> None:
        """One choice of an attempt is not wanted any more, others are."""

    # From a prefill worker.
    async def reserve(self, request: worker_pb2.ReserveRequest) -> worker_pb2.Grant:
        raise self._refuse("hold blocks for others")

    async def commit(self, request: worker_pb2.CommitRequest) -> worker_pb2.CommitReply:
        raise self._refuse("take commits")

    async def close_ticket(self, request: worker_pb2.CloseTicketRequest) -> None:
        raise self._refuse("have tickets of others")

    def lease(self, request: worker_pb2.LeaseRequest) -> worker_pb2.LeaseReply:
        raise self._refuse("give leases")

    # From a worker that has a prompt of which this one holds leading blocks.
    async def pull(self, request: worker_pb2.PullRequest) -> worker_pb2.PullReply:
        raise self._refuse("lend KV")

    async def end_pull(self, request: worker_pb2.EndPullRequest) -> worker_pb2.EndPullReply:
        raise self._refuse("lend KV")

    # From the children.
    def on_engine(self, message: Any) -> None:
        """Any message but StepDone."""

    def on_output(self, live: LiveRequest, output: m.SequenceOutput) -> bool:
        """One choice's part of a step; True where the request is over on this worker."""
        return not live.open_choices

    def on_transfer(self, message: Any) -> None:
        """Any message of the transfer child."""

    def on_transfer_lost(self) -> None:
        """The transfer child ended; everything it had on the wire is fenced by that."""

    def on_transfer_restarted(self) -> None:
        """A new transfer child runs; it knows nothing of before."""

    async def stop(self) -> None:
        """Cancel what still runs."""
