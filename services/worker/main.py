"""The program of a worker without Ray: ``python -m services.prefill`` and ``python -m services.decode``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from services import config as settings
from services.config import ServeConfig
from services.worker.children import WorkerLost
from services.worker.runtime import WorkerRuntime, run_until_signal

Build = Callable[[ServeConfig, Path, str, str], WorkerRuntime]


def main(build: Build, roles: tuple[str, ...], arguments: list[str] | None = None) -> int:
    """Parse the command line, run one worker, return its exit code: 0 after a signal, 1 where it was lost."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{roles[0]}", description="One pdray worker.")
    parser.add_argument("--config", help="YAML file; settings: services/config.py")
    parser.add_argument("--model", required=True, type=Path, help="a folder that `pdray prepare` made")
    parser.add_argument("--role", choices=roles, default=roles[0])
    parser.add_argument("--worker-id", default="", help="default: role and a random suffix")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = settings.load(options.config)
    try:
        return asyncio.run(_run(build, config, options))
    except WorkerLost as exc:
        logging.getLogger("pdray.worker").error("%s", exc)
        return 1


async def _run(build: Build, config: ServeConfig, options: argparse.Namespace) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return await run_until_signal(build(config, options.model, options.role, options.worker_id), stop)
