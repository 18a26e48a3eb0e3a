"""The router's own ports: HTTP by uvicorn and gRPC by grpc.aio, in the event loop that calls.

serve_fronts ─► accepting ─stop(drain_s)─► draining (no new connections) ─► ended (an error for what is left)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass

import grpc.aio
import uvicorn
from fastapi import FastAPI

from kvstore.errors import ConfigError
from services.config import ServeConfig, TlsConfig
from services.router.front import Front
from services.router.grpc_server import Servicers, start_grpc
from services.router.live import Live
from services.router.openai_http import build_http_app
from services.router.tls import check_tls
from services.router.types import Core

BACKLOG = 2048
ENDING_S = 2.0
"""After the drain time, so long for the clients of what is left to take their error."""
KEEP_ALIVE_S = 75
START_LIMIT_S = 10.0
POLL_S = 0.005

_log = logging.getLogger("pdray.router")


class PortInUse(ConfigError):
    """Another process holds the port; the message names it and the setting."""


@dataclass(frozen=True, slots=True)
class Fronts:
    """Running fronts. ``http_app`` and ``servicers`` can be served elsewhere too (Ray Serve's ingress)."""

    http_port: int
    grpc_port: int
    http_app: FastAPI
    servicers: Servicers
    front: Front
    _http: _Uvicorn
    _http_task: asyncio.Task[None]
    _grpc: grpc.aio.Server

    async def stop(self, drain_s: float) -> None:
        """Take no new requests, wait up to ``drain_s`` for those on their way, end the rest with an error.

        The ports are free when it returns.
        """
        live: Live = self.http_app.state.live
        self._http.should_exit = True
        grpc_stop = asyncio.create_task(self._grpc.stop(drain_s))
        if not await live.drained(drain_s):
            _log.warning("%d HTTP requests are left after %g s of draining: they end with an error", len(live), drain_s)
            live.end_all()
            await live.drained(ENDING_S)
        await grpc_stop
        _, late = await asyncio.wait({self._http_task}, timeout=ENDING_S)
        if late:
            self._http.force_exit = True
            await asyncio.wait({self._http_task}, timeout=ENDING_S)
        await self.front.guard.stop()
        self.front.close()


async def serve_fronts(core: Core, config: ServeConfig) -> Fronts:
    """Bind both ports and serve; returns once both accept.

    Raises:
        PortInUse: with the port and the setting to change.
        ConfigError: another address that cannot be bound, or an unusable model folder.
    """
    router = config.router
    async with contextlib.AsyncExitStack() as undo:
        front = Front(core)
        undo.callback(front.close)
        undo.push_async_callback(front.guard.stop)
        front.guard.start()
        check_tls(config.tls)
        sock = undo.enter_context(_listen(router.host, router.port, "router.port"))
        http_port = int(sock.getsockname()[1])
        servicers = Servicers.of(front)
        _listen(router.host, router.grpc_port, "router.grpc_port").close()  # grpc does not tell why it cannot bind
        server, grpc_port = await start_grpc(config, front, servicers)
        undo.push_async_callback(server.stop, None)
        app = build_http_app(core, front)
        http = _Uvicorn(_uvicorn_config(app, config.tls))
        task = asyncio.create_task(http.serve([sock]), name="pdray-http")
        await _until_started(http, task)
        undo.pop_all()
    return Fronts(http_port, grpc_port, app, servicers, front, http, task, server)


async def _until_started(http: _Uvicorn, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while not http.started:
            await asyncio.wait({task}, timeout=POLL_S)
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server ended before it had started")


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _uvicorn_config(app: FastAPI, tls: TlsConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=tls.cert_file or None,
        ssl_keyfile=tls.key_file or None,
        ssl_ca_certs=tls.client_ca_file or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_ca_file else ssl.CERT_NONE,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. Accepted ones inherit TCP_NODELAY: asyncio sets it only where the protocol number says TCP,
    and without it a token may wait 40 ms for the acknowledgement of the one before.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as exc:
        raise _cannot_bind(host, port, setting, exc) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise _cannot_bind(host, port, setting, exc) from None
    return sock


def _cannot_bind(host: str, port: int, setting: str, reason: OSError) -> ConfigError:
    if reason.errno == errno.EADDRINUSE:
        return PortInUse(f"{setting}: port {port} on {host} is in use; set another {setting}, or 0 for a free one")
    return ConfigError(f"{setting}: cannot listen on {host}:{port}: {reason}")
