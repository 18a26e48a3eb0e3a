"""The embedded store as a Ray Serve deployment of one replica, for applications that no `pdray serve` stands behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ray import serve

from kvstore.index.embedded import EmbeddedValkey
from services.start.shares import STORE_CPUS

NAME = "store"


class Store:
    """Owns one Valkey on this node's loopback. Who needs its address asks with `url`; a new replica has another."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self._folder = tempfile.TemporaryDirectory(prefix="pdray-store-")
        self._server = EmbeddedValkey()
        self._url = await self._server.start(Path(self._folder.name))

    async def url(self) -> str:
        return self._url

    async def check_health(self) -> None:
        """A server that has ended is started again at the same address; raises IndexUnavailable where that fails."""
        await self._server.start(Path(self._folder.name))

    async def __del__(self) -> None:
        await self._server.stop()
        self._folder.cleanup()


def deployment() -> serve.Deployment:
    """The deployment; always one replica, since it is the meeting point."""
    return serve.deployment(
        name=NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": STORE_CPUS},
        max_ongoing_requests=1000,
        health_check_period_s=2,
        logging_config={"enable_access_log": False},
    )(Store)
