"""Access over gRPC: an interceptor of the router's own server, and the same check for calls through Serve's proxy.

Whoever answers a call asks `current_caller` who it is for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from services.protocol.errors import RequestError
from services.router.access.caller import ANONYMOUS, Caller
from services.router.access.guard import Guard
from services.router.access.http import presented_key
from services.router.access.scopes import ADMINISTER, rpc_rule
from services.router.grpc_errors import fail
from services.router.grpc_reading import behaviour_of, rebuilt

_CALLER: ContextVar[Caller] = ContextVar("pdray_caller", default=ANONYMOUS)


def current_caller() -> Caller:
    """Who the call of this task is for."""
    return _CALLER.get()


@asynccontextmanager
async def admitted(guard: Guard, method: str, context: Any) -> AsyncIterator[None]:
    """A call that may go on; one that may not ends here, with its status. ``method``: /package.Service/Method.

    Raises: what `fail` does.
    """
    rule = rpc_rule(method)
    caller: Caller | None = None
    try:
        caller = await guard.identify(presented_key(raw_metadata(context)), rule)
        guard.authorize(caller, rule)
        _CALLER.set(caller)
        if not rule.is_counted:
            _tell(guard, method, context, caller, "called")
            yield
            return
        with guard.running(caller):
            limits = tuple(caller.headers(guard.clock()).items())
            if limits:
                context.set_trailing_metadata(limits)
            yield
    except RequestError as exc:
        _tell(guard, method, context, caller, str(exc.code))
        limits = () if caller is None else tuple(caller.headers(guard.clock()).items())
        await fail(context, exc, limits)


def _tell(guard: Guard, method: str, context: Any, caller: Caller | None, outcome: str) -> None:
    if rpc_rule(method) is ADMINISTER and caller is not None:
        peer = str(context.peer())
        guard.audit.tell(action=method, outcome=outcome, key=caller.name, tenant=caller.tenant, peer=peer)


def raw_metadata(context: Any) -> list[tuple[bytes, bytes]]:
    """What the client sent beside the message, as HTTP headers are."""
    metadata = context.invocation_metadata() if hasattr(context, "invocation_metadata") else None
    return [(k.encode(), v if isinstance(v, bytes) else v.encode("latin-1", "replace")) for k, v in metadata or ()]


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Around every RPC of a server, reflection and health too. A method that does not exist is told to nobody without
    a key."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if self._guard.is_idle:
            return handler
        method = details.method if isinstance(details.method, str) else str(details.method, "utf-8", "replace")
        return _guarded(self._guard, method, _MISSING if handler is None else handler)


async def _no_such_method(_request: Any, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    return b""


_MISSING = grpc.unary_unary_rpc_method_handler(_no_such_method)


def _guarded(guard: Guard, method: str, handler: Any) -> Any:
    """The handler of the same kind that asks first."""

    behaviour = behaviour_of(handler)

    async def one(request: Any, context: Any) -> Any:
        async with admitted(guard, method, context):
            return await behaviour(request, context)

    async def many(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        async with admitted(guard, method, context), aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                yield message

    return rebuilt(handler, many if handler.response_streaming else one, handler.request_deserializer)
