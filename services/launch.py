"""`pdray serve`, from the first check to the last process gone.

    checks ─► model prepared ─► store ─► Ray and Serve ─► application ─► ready ─► (signal) ─► drain ─► everything gone

Whatever fails on the way ends with StartError or ConfigError and its reason, after the part that did start has been
stopped again. A second signal while stopping ends the rest at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from kvstore.errors import IndexUnavailable
from services.config import ServeConfig, set_ray_environment
from services.present import Started, show_running, step
from services.protocol.model_card import ModelCard
from services.start.model import announcement, prepare_model
from services.start.ports import check_ports, with_serve_ports
from services.start.secret import with_new_secret
from services.start.shares import usable_cores, with_threads
from services.start.system import StartError, check_system

if TYPE_CHECKING:
    from services.app import Cluster

START_LIMIT_S = 1800.0
"""Longest wait for the application; a large model loads for minutes."""
DRAIN_S = 2.0
"""What live streams get when the whole server stops; the rest of the 10 s is Ray's."""
_POLL_S = 0.5
_WATCH_S = 2.0


class Stopped(BaseException):
    """A signal asked the server to stop. Not an Exception: nothing on the way may swallow it."""


class Signals:
    """SIGINT and SIGTERM raise Stopped in the main thread, once; the next one, while stopping, ends all at once."""

    def __init__(self) -> None:
        self._stopping = False

    def install(self) -> None:
        """Again after `ray.init`, which sets a handler of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def stopping(self) -> None:
        self._stopping = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            end_all(_descendants(), wait_s=0)
            raise SystemExit(1)
        self._stopping = True
        raise Stopped


def run(config: ServeConfig, console: Console, *, dashboard: bool) -> None:
    """Serve until a signal; returns when everything is stopped.

    Raises:
        StartError, ConfigError: it cannot start, or has died; the message is the reason.
    """
    config.check_pairs()
    if config.router.replicas > 1:
        raise StartError(f"router.replicas is {config.router.replicas}: one machine has one router, clusters have more")
    check_system(config.transfer)
    check_ports(config)
    config = with_threads(with_new_secret(with_serve_ports(config)), usable_cores())
    signals = Signals()
    signals.install()
    try:
        with contextlib.suppress(Stopped):
            folder = _prepare(config, console)
            with _store(config) as config:
                _serve(config, folder, console, signals, dashboard)
    finally:
        signals.stopping()


def _prepare(config: ServeConfig, console: Console) -> Path:
    if text := announcement(config.model):
        console.print(text, highlight=False)
    with step(console, f"model {config.model.path}"):
        return prepare_model(config, lambda line: console.print(f"  {line}", style="dim", markup=False))


def _serve(config: ServeConfig, folder: Path, console: Console, signals: Signals, dashboard: bool) -> None:
    set_ray_environment()
    from services.app import Cluster, application  # imports Ray, which takes a second or two

    cluster = Cluster()
    others = {process.pid for process in _descendants()}
    try:
        with step(console, "Ray and its proxies"):
            cluster.start(config, dashboard=dashboard)
            signals.install()
        with step(console, "router and workers"):
            cluster.deploy(application(config, folder))
            ports, pairs = _wait_ready(cluster, console)
        running = Started(ModelCard.load(folder), *ports, moves_by(pairs), cluster.logs())
        show_running(console, config, running)
        _watch(cluster)
    finally:
        signals.stopping()
        with step(console, "stopping"):
            started = [process for process in _descendants() if process.pid not in others]
            try:
                cluster.stop(DRAIN_S)
            finally:
                end_all(started, wait_s=2)


def _wait_ready(cluster: Cluster, console: Console) -> tuple[tuple[int, int], list[dict[str, str]]]:
    """The router's own ports and the pairs of its workers, once it says that it can answer. Raises StartError with the
    reason why it never does."""
    deadline = time.monotonic() + START_LIMIT_S
    shown: object = None
    reason = ""
    while time.monotonic() < deadline:
        state = cluster.state()
        if state.has_failed:
            raise StartError(f"the application did not start: {last_line(state.message)}\nfull text: {cluster.logs()}")
        if state.status == "RUNNING":
            reason, pairs = cluster.router_readiness()
            if not reason:
                return cluster.router_ports(), pairs
        waiting = state.waiting_for or ((f"router: {reason}",) if reason else ())
        if waiting and waiting != shown:
            console.print(f"  waiting for {', '.join(waiting)}", style="dim", markup=False, highlight=False)
            shown = waiting
        time.sleep(_POLL_S)
    raise StartError(f"the application was not ready within {START_LIMIT_S:.0f} s: {reason}; logs: {cluster.logs()}")


def moves_by(pairs: Sequence[Mapping[str, str]]) -> str:
    """What the pairs of /v1/cluster really move KV by, and why that is not what was asked for, where it is not."""
    shown = dict.fromkeys((pair["transport"], pair["note"]) for pair in pairs)
    texts = (note if note.startswith(transport) else f"{transport} {note}".strip() for transport, note in shown)
    return ", ".join(text for text in texts if text)


def last_line(text: str) -> str:
    """Of a traceback the line that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _watch(cluster: Cluster) -> None:
    """Wait for a signal. Raises StartError where Ray itself has died."""
    core = [process for process in psutil.Process().children() if process.name() in ("gcs_server", "raylet")]
    quiet = threading.Event()
    while not quiet.wait(_WATCH_S):
        for process in core:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise StartError(f"Ray's {process.name()} has died; logs: {cluster.logs()}")


@contextlib.contextmanager
def _store(config: ServeConfig) -> Iterator[ServeConfig]:
    """The configuration with the address of the embedded store, which lives as long as the block."""
    if config.redis.url != "embedded":
        yield config
        return
    from kvstore.index.embedded import EmbeddedValkey

    server = EmbeddedValkey()
    with tempfile.TemporaryDirectory(prefix="pdray-store-") as folder:
        try:
            address = asyncio.run(server.start(Path(folder)))
        except IndexUnavailable as exc:
            raise StartError(f"{exc}; or start with --redis-url none, or the address of a Redis") from None
        try:
            yield dataclasses.replace(config, redis=dataclasses.replace(config.redis, url=address, is_embedded=True))
        finally:
            asyncio.run(server.stop())


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def end_all(processes: list[psutil.Process], wait_s: float) -> None:
    """Wait for these processes to end, then kill the rest."""
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2)
