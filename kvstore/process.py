"""A child process with a pipe of messages: how a worker's engine and its transfers run beside its service process.

The child dies with its parent (parent-death signal), inherits only the descriptors it is given, and speaks `Codec`
messages. The parent's side is asyncio; the child's side is blocking, since a child is one loop of work.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.wire import Codec, Deframer, WireError

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("pdray.process")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends; exit at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class ChildChannel:
    """The child's end of the pipe."""

    def __init__(self, fd: int, codec: Codec) -> None:
        self._socket = socket.socket(fileno=fd)
        self._codec = codec
        self._deframer = Deframer()
        self._ready: list[Any] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        self._socket.sendall(self._codec.frame(message))

    def receive(self, timeout_s: float | None) -> list[Any]:
        """All messages that have come, after waiting at most ``timeout_s`` for the first (0: none, None: for ever).

        Raises EOFError when the parent has closed the pipe.
        """
        self._socket.settimeout(timeout_s)
        try:
            while True:
                data = self._socket.recv(1 << 20)
                if not data:
                    if self._ready:
                        break  # the end is told at the next call
                    raise EOFError("the service process closed the pipe")
                self._ready += [self._codec.decode(body) for body in self._deframer.feed(data)]
                if self._ready:
                    self._socket.settimeout(0)
        except (BlockingIOError, TimeoutError):
            pass
        finally:
            self._socket.settimeout(None)
        messages, self._ready = self._ready, []
        return messages


class Child:
    """The parent's end: starts ``python -m module fd [args]``, sends messages, gives received ones to ``on_message``.

    ``on_exit`` is called once, with the exit code, when the child ends for whatever reason.
    """

    def __init__(
        self, codec: Codec, on_message: Callable[[Any], None], on_exit: Callable[[int], None], name: str
    ) -> None:
        self._codec = codec
        self._on_message = on_message
        self._on_exit = on_exit
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(
        self, module: str, args: Sequence[str] = (), pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Call it from a thread that outlives the child (the event loop's): the kernel ties its life to that thread."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), *args],
                pass_fds=[theirs.fileno(), *pass_fds],
                env=None if env is None else {**os.environ, **env},
                stdin=subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._task = asyncio.create_task(self._read(reader), name=f"{self._name}-pipe")

    def send(self, message: Any) -> None:
        """Queue one message; dropped where the child has ended (``on_exit`` tells)."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._codec.frame(message))

    async def stop(self, timeout_s: float) -> None:
        """Close the pipe, wait, then kill."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), timeout_s)
        except TimeoutError:
            self.kill()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=2)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        deframer = Deframer()
        try:
            while data := await reader.read(1 << 20):
                for body in deframer.feed(data):
                    self._on_message(self._codec.decode(body))
        except (ConnectionError, WireError):
            self.kill()
        except Exception:  # the edge of a process: a handler that fails leaves the child without its parent's answers
            _log.exception("handling a message of the %s process failed; it is ended", self._name)
            self.kill()
        finally:
            assert self._process is not None
            code = await asyncio.to_thread(self._process.wait)
            self._on_exit(code)
