"""The outermost layer of the HTTP app: when a request came, which ids it has, and that it always gets an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.protocol.errors import ErrorCode, RequestError
from services.router.admission.explain import HEADER, decision_header, is_asked
from services.router.admission.slo import slo_headers
from services.router.front import Arrival, label_of
from services.router.live import Live
from services.router.problem import error_response
from services.router.turnstile import Turnstile

ARRIVAL = "pdray.arrival"
"""Key of the request's `Arrival` in the ASGI scope."""

_log = logging.getLogger("pdray.router")


class Edge:
    """ASGI middleware. X-Request-Id: the client's, sanitised, or our own; on every answer, errors too.

    With X-PDRay-Explain: 1 the answer says in X-PDRay-Decision why the request went where it went.
    """

    def __init__(self, app: ASGIApp, live: Live, shown: Callable[[str], dict[str, Any] | None]) -> None:
        """``shown``: what /debug/requests/{id} shows of a request."""
        self._app = app
        self._live = live
        self._shown = shown
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = Arrival(label=_label(scope), slo=slo_headers(scope["headers"]))
        scope[ARRIVAL] = arrival
        request_id = (arrival.label or arrival.request_id).encode()
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                own = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
                if is_asked(scope["headers"]):
                    own.append((HEADER, decision_header(self._shown(arrival.request_id))))
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            with self._live.opened():
                if scope["method"] == "POST":  # health and the like are quick, and never wait
                    await self._turnstile.enter()
                await self._app(scope, receive, send_with_id)
        except Exception:  # the edge of the process: the client gets an error, the log the reason
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if is_started:
                raise
            error = RequestError(ErrorCode.INTERNAL, "the router failed to answer; see its log")
            await error_response(error, scope["path"])(scope, receive, send_with_id)


def _label(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return label_of(value.decode("latin-1"))
    return ""
