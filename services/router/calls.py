"""Unary calls to a worker: each has a deadline, and each failure is a RequestError that says what may be tried next."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.protocol.status import sent_error

CALL_TIMEOUT_S = 5.0
"""Longest wait for the answer to a Submit or Retarget; a healthy worker answers in a millisecond."""
ABORT_TIMEOUT_S = 2.0
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WorkerCalls:
    """The router's calls of one worker. ``who`` names it in messages."""

    def __init__(self, stub: Any, who: str) -> None:
        self._stub = stub
        self._who = who

    async def describe(self, timeout_s: float) -> worker_pb2.Registration:
        """Raises RequestError."""
        reply: worker_pb2.Registration = await self._call("Describe", worker_pb2.DescribeRequest(), timeout_s)
        return reply

    async def submit(self, request: worker_pb2.SubmitRequest, remaining_s: float) -> None:
        """Raises RequestError: the worker's own refusal, or WORKER_LOST."""
        await self._call("Submit", request, min(remaining_s, CALL_TIMEOUT_S))

    async def retarget(self, request: worker_pb2.RetargetRequest, remaining_s: float) -> None:
        """Raises RequestError as `submit` does."""
        await self._call("Retarget", request, min(remaining_s, CALL_TIMEOUT_S))

    async def abort(self, request: worker_pb2.AbortRequest) -> None:
        """Raises RequestError."""
        await self._call("Abort", request, ABORT_TIMEOUT_S)

    async def steps(self, last: int, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The engine's last steps. Raises RequestError."""
        reply = await self._call("Steps", worker_pb2.StepsRequest(last=last), timeout_s)
        try:
            return json.loads(reply.json)
        except ValueError:
            raise RequestError(ErrorCode.INTERNAL, f"{self._who} sent steps that are no JSON") from None

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=max(timeout_s, 0.001))
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc, f"{method} on {self._who}") from None
        except grpc.aio.UsageError:  # the channel was closed under the call
            raise RequestError(ErrorCode.WORKER_LOST, f"{method} on {self._who}: the link was closed") from None


def error_of(exc: grpc.aio.AioRpcError, what: str) -> RequestError:
    """What a worker meant by a failed call; a broken or silent connection is WORKER_LOST."""
    if (error := sent_error(exc)) is not None:
        return error
    text = f"{what}: {exc.code().name}: {exc.details()}"
    return RequestError(ErrorCode.WORKER_LOST if exc.code() in _BROKEN else ErrorCode.INTERNAL, text)
