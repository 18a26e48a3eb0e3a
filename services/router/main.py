"""The router's program, ``python -m services.router --config FILE --model FOLDER``, and `start_router` for its hosts.

    start: card ─► index ─► core ─► fronts (ports bound)      stop: fronts drain ─► core ─► index

Needs neither torch, transformers nor Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.index.base import BlockIndex
from services import config as settings
from services.config import RedisConfig, ServeConfig
from services.protocol.model_card import ModelCard
from services.router.core import RouterCore
from services.router.discovery import Source
from services.router.serve import Fronts, serve_fronts
from services.telemetry.logs import setup_logging

_log = logging.getLogger("pdray.router")


@dataclass(frozen=True, slots=True)
class Router:
    """A running router. `stop` it once."""

    core: RouterCore
    fronts: Fronts
    index: BlockIndex | None

    @property
    def http_port(self) -> int:
        return self.fronts.http_port

    @property
    def grpc_port(self) -> int:
        return self.fronts.grpc_port

    def reconfigure(self, given: Mapping[str, Any]) -> None:
        """Take over live settings. Raises ConfigError where they cannot be, and nothing has changed then."""
        self.core.reconfigure(given)
        self.fronts.front.guard.set_defaults(self.core.config.access)

    def settle(self) -> None:
        """For a process that is a router for the rest of its life: what the start made stays, so the garbage collector
        need not look through it again while streams wait."""
        gc.collect()
        gc.freeze()

    async def stop(self, drain_s: float) -> None:
        """Let running requests end, ``drain_s`` at most, then close everything."""
        self.core.flow.refuse_new()
        try:
            await self.fronts.stop(drain_s)
        finally:
            await self.core.stop()
            if self.index is not None:
                await self.index.close()


async def start_router(config: ServeConfig, model_folder: Path, sources: Sequence[Source] = ()) -> Router:
    """A router that listens, and looks for its workers in ``config.workers``, Redis and ``sources``.

    Raises:
        ConfigError: the model is not prepared, a port is busy, or a setting cannot work.
    """
    if not config.secret:
        raise ConfigError("secret must not be empty: router and workers of an application share it")
    index = make_index(config.redis)
    core = RouterCore(config, ModelCard.load(model_folder), index=index, sources=sources)
    await core.start()
    try:
        fronts = await serve_fronts(core, config)
    except BaseException:
        await core.stop()
        if index is not None:
            await index.close()
        raise
    return Router(core, fronts, index)


def make_index(redis: RedisConfig) -> BlockIndex | None:
    """The client of this application's Redis; None where none is configured, or the embedded one has no address yet.

    Raises ConfigError for an address of no kind that Redis has.
    """
    if redis.url in ("none", "embedded"):
        return None
    from kvstore.index.redis import RedisIndex

    try:
        return RedisIndex(redis.address, redis.namespace, redis.ttl_s)
    except ValueError as exc:
        raise ConfigError(f"redis.url is not usable: {exc}") from None


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one router until SIGTERM or SIGINT; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.router", description="One pdray router.")
    parser.add_argument("--config", help="YAML file; settings: services/config.py")
    parser.add_argument("--model", required=True, type=Path, help="a folder that `pdray prepare` made")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that running requests get at the end")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments)
    try:
        setup_logging(options.log_level)
        return asyncio.run(_run(settings.load(options.config), options.model, options.drain))
    except (ConfigError, ValueError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2


async def _run(config: ServeConfig, model_folder: Path, drain_s: float) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    router = await start_router(config, model_folder)
    router.settle()
    ports = {"http_port": router.http_port, "grpc_port": router.grpc_port}
    sys.stdout.write(json.dumps(ports) + "\n")  # one line for whoever started it with port 0
    sys.stdout.flush()
    _log.info("listening on %s, HTTP %d, gRPC %d", config.router.host, router.http_port, router.grpc_port)
    await stop.wait()
    _log.info("stopping; running requests get %g s", drain_s)
    await router.stop(drain_s)
    return 0
