"""`pdray serve` as a scenario needs it: on a free port, ready, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from services.bench.stage import free_port

READY_S = 600.0  # a first start prepares the model and compiles kernels
STOP_S = 60.0
PDRAY = (sys.executable, "-m", "services.cli")
PORTS = ("--grpc-port", "0", "--set", "router.serve_port=0", "--set", "router.serve_grpc_port=0")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    command: str  # as one would type it, without the ports


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of `pdray serve`."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={_plain(value)}")]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def prepare(settings: Mapping[str, Any]) -> None:
    """Prepare the model that these settings name, so that servers that start together do not both do it.

    Raises:
        ConfigError: it cannot be prepared.
    """
    options = [
        "--model",
        str(settings.get("model.path", "default")),
        "--dtype",
        str(settings.get("model.dtype", "auto")),
    ]
    done = subprocess.run([*PDRAY, "prepare", *options, "--plain"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"`{shlex.join(['pdray', 'prepare', *options])}`: {(done.stdout + done.stderr).strip()[-500:]}"
        )


@contextlib.contextmanager
def serving(settings: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[list[Running]]:
    """Servers with these settings, all ready; started together, stopped together. Logs go to ``folder``.

    Raises:
        ConfigError: one of them does not come up; the message ends with its last lines.
    """
    processes: list[subprocess.Popen[bytes]] = []
    running: list[Running] = []
    logs = [folder / f"serve-{i}.log" for i in range(len(settings))]
    try:
        for one, log in zip(settings, logs, strict=True):
            port, options = free_port(), arguments_of(one)
            processes.append(_start([*PDRAY, "serve", *options, "--port", str(port), *PORTS], log))
            running.append(Running(f"http://127.0.0.1:{port}", shlex.join(["pdray", "serve", *options])))
        deadline_s = time.monotonic() + READY_S
        for process, server, log in zip(processes, running, logs, strict=True):
            _wait_ready(process, server, log, deadline_s)
        yield running
    finally:
        _stop(processes)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches it through `_stop` alone."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, at once; where one does not, end its whole session."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    for process in living:
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], running: Running, log: Path, deadline_s: float) -> None:
    while not _is_ready(running.url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
            how = f"ended with code {process.returncode}" if process.poll() is not None else "is not ready"
            raise ConfigError(f"`{running.command}` {how}:\n" + "\n".join(said))
        time.sleep(0.3)


def _is_ready(url: str) -> bool:
    try:
        with _OPENER.open(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:  # also an HTTP error: not ready
        return False
