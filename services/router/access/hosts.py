"""Against DNS rebinding: a page whose own name resolves to this machine is of the same origin as this router, so that
neither the browser's rules nor a missing CORS header keep it from asking and from reading answers.

What gives such a page away is the name in its Host header. A router that only this machine reaches and that asks for no
key takes addresses, localhost and configured names; with keys, or on other addresses, every name is as good.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from services.config import ServeConfig
from services.protocol.errors import ErrorCode, RequestError
from services.router.problem import error_response

ANY = "*"


def checks_hosts(config: ServeConfig) -> bool:
    """Whether nothing but the network keeps others from this router."""
    return not config.access.keys_file and ANY not in config.access.hosts and serves_this_machine(config.router.host)


def is_local(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header names this machine, or a name that is allowed. ``host``: with or without a port."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or name in allowed or _is_address(name)


class HostCheck:
    """ASGI middleware: 403 for another name. A request without a Host header, which no browser sends, passes."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host" and value]
            if wrong := next((host for host in hosts if not is_local(host, self._allowed)), None):
                text = f"this router serves its own machine, and not {wrong[:100]!r}; access.hosts allows further names"
                error = RequestError(ErrorCode.PERMISSION_DENIED, text)
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def serves_this_machine(host: str) -> bool:
    """Whether an address to listen on, or ``localhost``, is reached from this machine alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
