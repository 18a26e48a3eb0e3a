"""Access over HTTP: an ASGI middleware inside `Edge`, around every route, also those that do not exist."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.protocol.errors import ErrorCode, RequestError
from services.router.access.caller import Caller
from services.router.access.guard import Guard
from services.router.access.scopes import ADMINISTER, Rule, http_rule
from services.router.edge import ARRIVAL
from services.router.problem import error_response


class AccessMiddleware:
    """Refuses with 401, 403 and 429; tells the front who calls by the request's `Arrival`."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._guard.wants_keys:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or self._guard.is_idle:
            await self._app(scope, receive, send)
            return
        rule = http_rule(scope["method"], _path(scope))
        caller: Caller | None = None
        try:
            caller = await self._guard.identify(presented_key(scope["headers"]), rule)
            self._guard.authorize(caller, rule)
            await self._serve(caller, rule, scope, receive, send)
        except RequestError as exc:
            self._tell(rule, scope, caller, str(exc.code))
            response = error_response(exc, scope["path"])
            response.headers.update({} if caller is None else caller.headers(self._guard.clock()))
            if exc.code is ErrorCode.UNAUTHENTICATED:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)

    async def _serve(self, caller: Caller, rule: Rule, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError before anything was sent; the app's own errors it answers itself."""
        scope[ARRIVAL] = replace(scope[ARRIVAL], caller=caller)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._tell(rule, scope, caller, str(message["status"]))
                if rule.is_counted and caller.meters:
                    own = caller.headers(self._guard.clock()).items()
                    message = {**message, "headers": [*message.get("headers", []), *_raw(own)]}
            await send(message)

        with self._guard.running(caller) if rule.is_counted else nullcontext():
            await self._app(scope, receive, send_with_limits)

    def _tell(self, rule: Rule, scope: Scope, caller: Caller | None, outcome: str) -> None:
        if rule is not ADMINISTER or caller is None:
            return
        peer = scope.get("client") or ("", 0)
        action = f"{scope['method']} {scope['path']}"
        self._guard.audit.tell(action=action, outcome=outcome, key=caller.name, tenant=caller.tenant, peer=str(peer[0]))


def _path(scope: Scope) -> str:
    """The path below the prefix under which the app is served."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key of ``Authorization: Bearer``, or else of x-api-key; header names are in lower case."""
    found: str | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and found is None:
            found = value.decode("latin-1").strip()
    return found


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]
