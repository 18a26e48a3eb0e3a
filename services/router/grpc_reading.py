"""Bytes that are no message are the client's fault: INVALID_ARGUMENT, where grpc.aio by itself says UNKNOWN and logs a
traceback of each.

Deserializers give an `Unreadable` in place of raising; who serves a call looks for it by `readable`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.protocol.errors import RequestError, invalid

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message that could not be read."""

    num_bytes: int


def readable(request: T) -> T:
    """The message. Raises RequestError INVALID_REQUEST where it could not be read."""
    if isinstance(request, Unreadable):
        raise invalid(f"the {request.num_bytes} bytes of the request are no message of this method")
    return request


async def all_readable(requests: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The messages of a stream. Raises RequestError INVALID_REQUEST at one that could not be read."""
    async for request in requests:
        yield readable(request)


class ReadingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts the deserializers in place, once for each method."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = self._handlers.get(details.method)
        if handler is None:
            found = await continuation(details)
            if found is None:
                return None
            handler = self._handlers[details.method] = _reading(found, "Reflection" in str(details.method))
        return handler


def _reading(handler: Any, is_foreign: bool) -> Any:
    """The same handler with a deserializer that does not raise. ``is_foreign``: a bidirectional one that knows nothing
    of `Unreadable`."""
    read = handler.request_deserializer

    def try_to_read(data: bytes) -> Any:
        try:
            return read(data)
        except (DecodeError, ValueError):
            return Unreadable(len(data))

    if is_foreign:
        behaviour = _checked(handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(behaviour, try_to_read, handler.response_serializer)
    return rebuilt(handler, behaviour_of(handler), try_to_read)


def _checked(behaviour: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def many(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(all_readable(requests)) as read:
                async for message in behaviour(read, context):
                    yield message
        except RequestError as exc:
            await context.abort(grpc.StatusCode[exc.status.grpc], exc.message)

    return many


def behaviour_of(handler: Any) -> Any:
    """The one function that a handler has."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def rebuilt(handler: Any, behaviour: Any, deserializer: Any) -> Any:
    """A handler of the same kind."""
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, deserializer, handler.response_serializer)
