"""The gRPC face of a worker: each call is authenticated and bounded, and answered with a status of the one map."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.protocol.status import sent_error, trailing_of
from services.worker.core import WorkerCore

Reply = TypeVar("Reply")
_log = logging.getLogger("pdray.worker.service")


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Translates calls into those of `WorkerCore`; holds no state."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    async def Describe(self, request: Any, context: Any) -> worker_pb2.Registration:
        return self._core.registration

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        try:
            async for message in self._core.hub.serve(requests):
                yield message
        except RequestError as exc:  # a router that is not understood
            await context.abort(grpc.StatusCode[exc.status.grpc], exc.message, tuple(trailing_of(exc)))

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        async def call() -> worker_pb2.SubmitReply:
            await self._core.submit(request)
            return worker_pb2.SubmitReply()

        return await _answer(context, call)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        async def call() -> worker_pb2.AbortReply:
            if request.choices:
                await self._core.drop_choices(request.request_id, request.attempt, request.choices)
            else:
                await self._core.abort(request.request_id, request.attempt, request.reason)
            return worker_pb2.AbortReply()

        return await _answer(context, call)

    async def Retarget(self, request: worker_pb2.RetargetRequest, context: Any) -> worker_pb2.RetargetReply:
        async def call() -> worker_pb2.RetargetReply:
            await self._core.role.retarget(request)
            return worker_pb2.RetargetReply()

        return await _answer(context, call)

    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Any) -> worker_pb2.Grant:
        return await _answer(context, lambda: self._core.role.reserve(request))

    async def Commit(self, request: worker_pb2.CommitRequest, context: Any) -> worker_pb2.CommitReply:
        return await _answer(context, lambda: self._core.role.commit(request))

    async def CloseTicket(self, request: worker_pb2.CloseTicketRequest, context: Any) -> worker_pb2.CloseTicketReply:
        async def call() -> worker_pb2.CloseTicketReply:
            await self._core.role.close_ticket(request)
            return worker_pb2.CloseTicketReply()

        return await _answer(context, call)

    async def Lease(self, request: worker_pb2.LeaseRequest, context: Any) -> worker_pb2.LeaseReply:
        async def call() -> worker_pb2.LeaseReply:
            return self._core.role.lease(request)

        return await _answer(context, call)

    async def Pull(self, request: worker_pb2.PullRequest, context: Any) -> worker_pb2.PullReply:
        return await _answer(context, lambda: self._core.role.pull(request))

    async def EndPull(self, request: worker_pb2.EndPullRequest, context: Any) -> worker_pb2.EndPullReply:
        return await _answer(context, lambda: self._core.role.end_pull(request))

    async def Steps(self, request: worker_pb2.StepsRequest, context: Any) -> worker_pb2.StepsReply:
        async def call() -> worker_pb2.StepsReply:
            try:
                return worker_pb2.StepsReply(json=await self._core.steps(min(request.last or 64, 1024)))
            except TimeoutError:
                raise RequestError(ErrorCode.WORKER_LOST, "the engine did not answer within 5 s") from None

        return await _answer(context, call)


async def _answer(context: Any, call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Run one call; a RequestError becomes its status, with its code in the trailing metadata."""
    try:
        return await call()
    except RequestError as exc:
        error = exc
    except grpc.aio.AbortError:
        raise
    except Exception:  # the edge of the process: one broken call must not end the worker
        _log.exception("a call failed")
        error = RequestError(ErrorCode.INTERNAL, "the worker failed to handle the call; its log has the reason")
    await context.abort(grpc.StatusCode[error.status.grpc], error.message, tuple(trailing_of(error)))
    raise AssertionError("abort raises")


def error_of(exc: grpc.aio.AioRpcError, who: str) -> RequestError:
    """The RequestError that a worker meant by a failed call; a broken connection is WORKER_LOST."""
    if (error := sent_error(exc)) is not None:
        return error
    if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(ErrorCode.DEADLINE_EXCEEDED, f"{who} did not answer within the request's budget")
    return RequestError(ErrorCode.WORKER_LOST, f"{who}: {exc.code().name}: {exc.details()}")
