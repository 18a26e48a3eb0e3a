"""How a client's call ends with an error: one map for all RPCs, with google.rpc's details where they say something.

status and message            of the `RequestError`
pdray-error-code              its code, in trailing metadata
retry-after-ms                and RetryInfo, where another try is advised
BadRequest                    where a field is at fault
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.status import trailing_of
from services.router.grpc_reading import readable

DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1024
"""Of UTF-8. A trailer holds the message twice, once at three times its size; 8 KiB is what clients take."""
NO_DEADLINE_S = 10 * 365 * 86_400.0
"""gRPC tells an absent deadline as one in the far future, or as None."""

S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")

_log = logging.getLogger("pdray.router")


async def fail(context: Any, error: RequestError, more: Sequence[tuple[str, str]] = ()) -> NoReturn:
    """End the call with the error's status and details, and ``more`` trailing metadata.

    Raises: what the context's own ``abort`` raises, or, behind Serve's proxy, ``error`` itself.
    """
    code = grpc.StatusCode[error.status.grpc]
    message = error.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")
    metadata: list[tuple[str, Any]] = [*trailing_of(error), *more, *_details(error, code, message)]
    if hasattr(context, "abort"):
        await context.abort(code, message, tuple(metadata))
    context.set_code(code)
    context.set_details(message)
    context.set_trailing_metadata(metadata)
    raise error


def _details(error: RequestError, code: grpc.StatusCode, message: str) -> list[tuple[str, bytes]]:
    details: list[Any] = []
    if error.retry_after_s is not None:
        wait = duration_pb2.Duration()
        wait.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=wait))
    if error.param is not None:
        field = error.param.encode("utf-8", "replace")[:256].decode("utf-8", "ignore")
        violation = error_details_pb2.BadRequest.FieldViolation(field=field)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if not details:
        return []
    packed = [any_pb2.Any() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    return [(DETAILS_KEY, status.SerializeToString())]


def internal() -> RequestError:
    """What a client hears of a bug; the log has the reason."""
    return RequestError(ErrorCode.INTERNAL, "the router failed to answer; see its log")


def remaining_s(context: Any) -> float | None:
    """Seconds until the client's deadline; None where it set none, or the context cannot tell."""
    left = context.time_remaining() if hasattr(context, "time_remaining") else None
    return None if left is None or left > NO_DEADLINE_S else max(0.0, float(left))


def answering(method: Callable[[S, Q, Any], Awaitable[R]]) -> Callable[[S, Q, Any], Awaitable[R]]:
    """An RPC with one answer, whose RequestErrors become statuses, and whose other errors INTERNAL."""

    @wraps(method)
    async def call(self: S, request: Q, grpc_context: Any) -> R:
        try:
            return await method(self, readable(request), grpc_context)
        except RequestError as exc:
            await fail(grpc_context, exc)
        except Exception:  # the edge of the process: the client gets an error, the log the reason
            _log.exception("%s failed", method.__name__)
            await fail(grpc_context, internal())

    return call


def streaming(
    method: Callable[[S, Q, Any], AsyncGenerator[R, None]],
) -> Callable[[S, Q, Any], AsyncGenerator[R, None]]:
    """Likewise an RPC that streams."""

    @wraps(method)
    async def call(self: S, request: Q, grpc_context: Any) -> AsyncGenerator[R, None]:
        try:
            async with aclosing(method(self, readable(request), grpc_context)) as messages:
                async for message in messages:
                    yield message
        except RequestError as exc:
            await fail(grpc_context, exc)
        except Exception:  # the edge of the process: the client gets an error, the log the reason
            _log.exception("%s failed", method.__name__)
            await fail(grpc_context, internal())

    return call
