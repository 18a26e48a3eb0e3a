"""A worker inside a Ray Serve replica, without Ray: what Serve calls on it, and what each call means here.

    begin ─► SERVING ── check_health raises ──► Serve replaces the replica
                │
                └─ close (Serve's destructor) ─► drain: no new work, live requests end ─► stop

Serve counts only its own requests and sees none of a worker's streams, so the drain happens in the destructor, inside
``graceful_shutdown_timeout_s``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from services.config import ServeConfig, from_dict
from services.start.marker import set_marker
from services.start.model import prepare_model

_log = logging.getLogger("pdray.start")

STORE_WAIT_S = 30.0
"""How long a starting replica waits for the embedded store; without it, it serves all the same."""
STOP_MARGIN_S = 10.0
"""What Serve leaves a replica beyond its drain limit, to close its children."""


class WorkerUnhealthy(RuntimeError):
    """Raised to Serve's health check; the message is the worker's own reason."""


class Runtime(Protocol):
    """What `services.worker.runtime.WorkerRuntime` offers its host."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None: ...

    async def drain(self, limit_s: float) -> bool: ...

    async def stop(self) -> None: ...

    def healthy(self) -> str: ...

    def autoscaling_stats(self) -> dict[str, float]: ...


Build = Callable[[ServeConfig, Path], Runtime]


class WorkerReplica:
    """Base of the worker deployments. `begin` must run before anything else, on the replica's event loop: the worker's
    children die with the thread that starts them."""

    _runtime: Runtime | None = None
    _drain_s: float = 0.0
    _marker: Path | None = None

    async def begin(self, config: ServeConfig, model_folder: str, build: Build) -> None:
        """Prepare the model where no folder is given, then start the worker; returns when it serves."""
        folder = Path(model_folder) if model_folder else await asyncio.to_thread(prepare_model, config, _log.info)
        self._drain_s = config.worker.drain_s
        runtime = build(config, folder)
        try:
            await runtime.start()
        except BaseException:
            await runtime.stop()
            raise
        self._runtime = runtime
        self._marker = set_marker()

    async def address(self) -> str:
        """host:port of the worker's gRPC service; empty until it serves."""
        return self._runtime.address if self._runtime else ""

    async def hasten(self, limit_s: float) -> None:
        """The whole application stops: drain no longer than this when the destructor comes."""
        self._drain_s = min(self._drain_s, limit_s)

    async def check_health(self) -> None:
        if self._runtime is not None and (reason := self._runtime.healthy()):
            raise WorkerUnhealthy(reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._runtime.autoscaling_stats() if self._runtime else {}

    async def close(self) -> None:
        """Drain, then stop. Safe to call twice, and before `begin` has ended."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        try:
            await runtime.drain(self._drain_s)
        finally:
            await runtime.stop()


async def replica_config(settings: Mapping[str, Any], store: Any, node_host: str) -> ServeConfig:
    """The application's configuration as it holds on this node.

    Args:
        settings: what `services.config.to_dict` made.
        store: handle of the application's own store (`services.store.deployment`); None where it has none.
        node_host: address that takes the place of the host ``node``.
    """
    config = from_dict(settings)
    router, worker, redis = config.router, config.worker, config.redis
    if router.host == "node":
        router = dataclasses.replace(router, host=node_host)
    if worker.host == "node":
        worker = dataclasses.replace(worker, host=node_host)
    if redis.url == "embedded":
        redis = dataclasses.replace(redis, url=await _store_url(store), is_embedded=store is not None)
    return dataclasses.replace(config, router=router, worker=worker, redis=redis)


async def _store_url(store: Any) -> str:
    if store is None:
        return "none"
    try:
        async with asyncio.timeout(STORE_WAIT_S):
            return str(await store.url.remote())
    except TimeoutError:
        _log.warning("the embedded store did not answer in %.0f s: this replica goes on without it", STORE_WAIT_S)
        return "none"


def worker_options(config: ServeConfig, num_cpus: float) -> dict[str, Any]:
    """Deployment options that every worker role shares.

    A failed start is tried three times only: its reason should show, not repeat.
    """
    return {
        "ray_actor_options": {"num_cpus": num_cpus},
        "max_ongoing_requests": 1000,
        "max_constructor_retry_count": 3,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": config.worker.drain_s + STOP_MARGIN_S,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "logging_config": {"enable_access_log": False},
    }
