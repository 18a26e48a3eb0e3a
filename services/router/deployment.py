"""The router as a Ray Serve deployment and ingress: a thin shell around `services.router.main`.

The HTTP app and the gRPC servicers are served twice: on the router's own ports, which is the fast path, and through
Serve's proxies. Serve counts none of the streams on the own ports, so the destructor drains them.
What is alpha in Serve (`DeploymentHandle.broadcast`) is used here only, and has a stable way around it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import ray.util
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvstore.errors import ConfigError
from services.config import ServeConfig
from services.router.access.hosts import serves_this_machine
from services.router.grpc_proxied import ProxiedRpcs
from services.router.main import Router, start_router
from services.router.serve import PortInUse
from services.start.model import prepare_model
from services.start.replica import replica_config, worker_options
from services.start.shares import ROUTER_CPUS
from services.telemetry.logs import setup_logging

NAME = "router"
ASK_LIMIT_S = 4.0
"""A replica that does not answer for so long is asked again in the next round."""
ASK_PERIOD_S = 2.0
"""Between two rounds once all is found; Attach, not these rounds, tells which workers live."""
PORT_WAIT_S = 15.0
"""A router that is being replaced frees its ports when it begins to drain; its successor waits so long for them."""
_PORT_POLL_S = 0.25

_log = logging.getLogger("pdray.router")
_Send = Callable[[Mapping[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class RouterReplica(ProxiedRpcs):
    """One router. ``workers`` are the handles of the worker deployments, asked for addresses only."""

    _router: Router | None = None  # also while `__init__` runs, and where it failed
    _has_started = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Mapping[str, Any],
        model_folder: str,
        workers: Sequence[DeploymentHandle[Any]],
        store: DeploymentHandle[Any] | None = None,
    ) -> None:
        setup_logging()
        config = await replica_config(settings, store, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        folder = Path(model_folder) if model_folder else await asyncio.to_thread(prepare_model, config, _log.info)
        sources = [WorkerAddresses(handle) for handle in workers]
        self._is_local = serves_this_machine(config.router.host)
        self._drain_s = config.worker.drain_s
        self._router = await _start(config, folder, sources)
        self._router.settle()
        self._fronts = self._router.fronts
        _log.info("router serves HTTP on port %d, gRPC on port %d", self._router.http_port, self._router.grpc_port)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Live settings, from Serve: once after `__init__`, then whenever ``user_config`` changes.

        Serve stops a replica that raises here, and its successor would raise too: the application would end for a
        typo. So a router that serves keeps what it has, says why in its log and at /v1/cluster, and raises only at
        its start. Raises ConfigError.
        """
        if self._router is None:
            return
        try:
            self._router.reconfigure(user_config)
            _log.info("live settings: %s", self._router.core.cluster()["settings"]["reloaded"] or "as built")
        except ConfigError as exc:
            if not self._has_started:
                raise
            _log.error("user_config is refused, settings stay as they were: %s", exc)
        self._has_started = True

    async def ports(self) -> tuple[int, int]:
        """The own HTTP and gRPC port."""
        return self._fronts.http_port, self._fronts.grpc_port

    async def readiness(self) -> tuple[str, list[dict[str, str]]]:
        """Why no request could be served now, empty where one could, and the pairs as at /v1/cluster."""
        if self._router is None:
            return "the router has stopped", []
        is_ready, reason = self._router.core.ready()
        return ("" if is_ready else reason), self._router.core.cluster()["pairs"]

    async def hasten(self, limit_s: float) -> None:
        """The whole application stops: drain no longer than this when the destructor comes."""
        self._drain_s = min(self._drain_s, limit_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests in this router, those on its own ports included."""
        return {"in_flight": float(self._router.core.flow.active) if self._router else 0.0}

    async def serve_http(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        await self._fronts.http_app(scope, receive, send)  # type: ignore[arg-type]

    async def __del__(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            await router.stop(self._drain_s)

    def refuse_strangers(self, grpc_context: Any) -> None:
        """Serve's gRPC proxy always listens on all interfaces; a router on loopback answers no other callers."""
        if self._is_local and not is_loopback(grpc_context.peer()):
            grpc_context.set_code(grpc.StatusCode.PERMISSION_DENIED)
            grpc_context.set_details("this router serves its own machine only (router.host)")
            raise PermissionError("a call from another machine")


def is_loopback(peer: str) -> bool:
    """Whether gRPC's name for a peer (ipv4:1.2.3.4:5, ipv6:[::1]:5 or its quoted form, unix:…) is on this machine."""
    kind, _, place = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        address = ipaddress.ip_address(place.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def _start(config: ServeConfig, folder: Path, sources: Sequence[WorkerAddresses]) -> Router:
    """Start the router; waits for ports that its predecessor still holds."""
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return await start_router(config, folder, sources)
        except PortInUse:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_PORT_POLL_S)


class WorkerAddresses:
    """Addresses of one deployment's workers: a source of discovery that asks Ray every `ASK_PERIOD_S` at most."""

    def __init__(self, handle: DeploymentHandle[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._handle = handle
        self._clock = clock
        self._last: list[str] = []
        self._asked_s = -ASK_PERIOD_S

    async def __call__(self) -> list[str]:
        """What the replicas said last; that stays while none can be asked, as when the last one has just died."""
        if not self._last or self._clock() - self._asked_s >= ASK_PERIOD_S:
            self._asked_s = self._clock()
            with suppress(RayError, RayServeException, TimeoutError):
                self._last = [address for address in await broadcast(self._handle, "address") if address]
        return self._last


async def broadcast(handle: DeploymentHandle[Any], method: str, *args: Any) -> list[Any]:
    """What each running replica of a deployment answers; one that fails is left out.

    Where this Ray has no `broadcast`, one replica of Serve's choice is asked; over some rounds that reaches all.

    Raises:
        RayError, RayServeException, TimeoutError: there is no replica, or they are too slow.
    """
    if not hasattr(handle, "broadcast"):
        async with asyncio.timeout(ASK_LIMIT_S):
            return [await getattr(handle, method).remote(*args)]
    response = handle.broadcast(method, *args)
    answers = await response.results_async(timeout_s=ASK_LIMIT_S, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def broadcast_blocking(handle: DeploymentHandle[Any], method: str, *args: Any, limit_s: float) -> bool:
    """`broadcast` for a thread without an event loop; False where no replica could be asked in time."""
    try:
        if hasattr(handle, "broadcast"):
            handle.broadcast(method, *args).results(timeout_s=limit_s, return_exceptions=True)
        else:
            getattr(handle, method).remote(*args).result(timeout_s=limit_s)
    except (RayError, RayServeException, TimeoutError):
        return False
    return True


class Ingress:
    """The ASGI app that Serve's proxy reaches: the router's own, which exists once the replica has started."""

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":  # the app's own lifespan belongs to the router's port
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        replica: Any = serve.get_replica_context().servable_object
        await replica.serve_http(scope, receive, send)


def make_ingress() -> Ingress:
    """Called in the replica, before its `__init__`."""
    return Ingress()


def deployment(config: ServeConfig) -> serve.Deployment:
    """The ingress deployment. Its own ports, where they are fixed, allow one replica for each node."""
    options = worker_options(config, ROUTER_CPUS) | {"num_replicas": config.router.replicas}
    options["max_ongoing_requests"] = 10_000
    options["user_config"] = {}  # so that one which is taken away again is an empty one, not none
    if config.router.replicas > 1 and (config.router.port or config.router.grpc_port):
        options["max_replicas_per_node"] = 1
    return serve.deployment(name=NAME, **options)(serve.ingress(make_ingress)(RouterReplica))
