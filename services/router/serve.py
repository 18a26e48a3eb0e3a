"""The router's own ports: HTTP by uvicorn and gRPC by grpc.aio, in the event loop that calls.

serve_fronts ─► accepting ─stop(drain_s)─► draining (no new connections) ─► ended (an error for what is left)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import uvicorn
from fastapi import FastAPI
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import ConfigError
from services.config import ServeConfig
from services.protocol.client import channel_options
from services.protocol.proto import inference_pb2_grpc
from services.router.front import Front
from services.router.grpc_front import INFERENCE, HealthServicer, InferenceServicer
from services.router.live import Live
from services.router.openai_http import build_http_app
from services.router.types import Core

BACKLOG = 2048
ENDING_S = 2.0
"""After the drain time, so long for the clients of what is left to take their error."""
KEEP_ALIVE_S = 75
START_LIMIT_S = 10.0
POLL_S = 0.005
MIN_PING_MS = 1_000

_log = logging.getLogger("pdray.router")


class PortInUse(ConfigError):
    """Another process holds the port; the message names it and the setting."""


@dataclass(frozen=True, slots=True)
class Fronts:
    """Running fronts. ``http_app``, ``inference`` and ``health`` can be served elsewhere too (Ray Serve's ingress)."""

    http_port: int
    grpc_port: int
    http_app: FastAPI
    inference: InferenceServicer
    health: HealthServicer
    _front: Front
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
        self._front.close()


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
        sock = undo.enter_context(_listen(router.host, router.port, "router.port"))
        http_port = int(sock.getsockname()[1])
        inference, health_servicer = InferenceServicer(front), HealthServicer(core)
        server, grpc_port = await _start_grpc(config, inference, health_servicer)
        undo.push_async_callback(server.stop, None)
        app = build_http_app(core, front)
        http = _Uvicorn(_uvicorn_config(app))
        task = asyncio.create_task(http.serve([sock]), name="pdray-http")
        await _until_started(http, task)
        undo.pop_all()
    return Fronts(http_port, grpc_port, app, inference, health_servicer, front, http, task, server)


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


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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


async def _start_grpc(
    config: ServeConfig, inference: InferenceServicer, health_servicer: HealthServicer
) -> tuple[grpc.aio.Server, int]:
    router = config.router
    server = grpc.aio.server(options=_server_options(router.max_body_bytes))
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    host = f"[{router.host}]" if ":" in router.host else router.host
    _listen(router.host, router.grpc_port, "router.grpc_port").close()  # grpc does not tell why it cannot bind
    try:
        port = server.add_insecure_port(f"{host}:{router.grpc_port}")
    except RuntimeError as exc:
        await server.stop(None)
        raise ConfigError(f"router.grpc_port: cannot listen on {host}:{router.grpc_port}: {exc}") from None
    await server.start()
    return server, int(port)


def _server_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        *channel_options(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]
