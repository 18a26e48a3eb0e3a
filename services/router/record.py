"""Live traffic as a trace in Mooncake's form: when requests came, how long they were, and which blocks they share.

    request ends ─note─► one JSON line ─┬─► a file (`router.record_trace`), by a thread
                                        └─► those who listen at /debug/trace, each with a bounded queue

A line has no text and no token ids: blocks of 512 tokens are named by a digest under a key that is drawn for each
recording and never leaves this process, so equal blocks are equal within one trace and say nothing outside it. Lines
come in the order in which requests end; `timestamp` tells when they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from queue import Full, Queue
from typing import IO

from kvstore.errors import ConfigError

BLOCK_TOKENS = 512
ID_BYTES = 6  # whole numbers that every JSON reader keeps exact
MAX_FILE_BYTES = 1 << 30
MAX_PENDING = 4096
"""Lines that may wait for the disk, or for one listener; more are dropped and counted."""
MAX_LISTENERS = 8

_log = logging.getLogger("pdray.router.record")


class Namer:
    """Names of blocks within one trace. Equal prefixes get equal names, under the same salt only."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def ids(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """One number for each block of 512 tokens, the shorter last one too; each depends on all before it."""
        parent = blake2b(salt.encode(), key=self._key, digest_size=32).digest()
        found = []
        for start in range(0, len(token_ids), BLOCK_TOKENS):
            block = array("q", token_ids[start : start + BLOCK_TOKENS]).tobytes()
            parent = blake2b(parent + block, key=self._key, digest_size=32).digest()
            found.append(int.from_bytes(parent[:ID_BYTES], "big"))
        return found


class Recorder:
    """Costs nothing while nobody records. Only the event loop calls it; the file is written by a thread of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listeners: dict[asyncio.Queue[bytes | None], tuple[Namer, float]] = {}
        self._file: TraceFile | None = None
        self.dropped = 0

    @property
    def is_active(self) -> bool:
        return bool(self._listeners) or self._file is not None

    def open(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Record into a file from now on. Raises ConfigError where it cannot be written."""
        self._file = TraceFile(path, self._clock(), max_bytes)

    def note(self, received_s: float, prompt_ids: Sequence[int], salt: str, output_tokens: int) -> None:
        """A request has ended. ``salt``: whatever keeps its KV apart from others'."""
        if self._file is not None and not self._file.put(received_s, prompt_ids, salt, output_tokens):
            self.dropped += 1
        for queue, (namer, start_s) in self._listeners.items():
            if received_s < start_s:
                continue
            line = trace_line(received_s - start_s, prompt_ids, namer.ids(prompt_ids, salt), output_tokens)
            try:
                queue.put_nowait(line)
            except asyncio.QueueFull:
                self.dropped += 1

    @property
    def is_crowded(self) -> bool:
        """Nobody more may listen."""
        return len(self._listeners) >= MAX_LISTENERS

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Lines of requests that come from now on, as they end; until it is closed, or the router stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_PENDING)
        self._listeners[queue] = Namer(), self._clock()
        try:
            while (line := await queue.get()) is not None:
                yield line
        finally:
            del self._listeners[queue]

    def end_listening(self) -> None:
        """The router stops: whoever listens gets the end."""
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def close(self) -> None:
        """Write what waits for the disk; returns when the file is whole."""
        if self._file is not None:
            self._file.close()
            self._file = None


def trace_line(at_s: float, prompt_ids: Sequence[int], ids: Sequence[int], output_tokens: int) -> bytes:
    """One line, with its end."""
    row = {
        "timestamp": round(1000 * at_s),
        "input_length": len(prompt_ids),
        "output_length": output_tokens,
        "hash_ids": ids,
    }
    return json.dumps(row, separators=(", ", ": ")).encode("ascii") + b"\n"


_Noted = tuple[float, Sequence[int], str, int]


class TraceFile:
    """A bounded trace on disk. A thread names the blocks and writes, so that neither is on a request's path."""

    def __init__(self, path: Path, start_s: float, max_bytes: int) -> None:
        self._start_s = start_s
        self._max_bytes = max_bytes
        self._queue: Queue[_Noted | None] = Queue(MAX_PENDING)
        self._is_full = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("wb")
        except OSError as exc:
            raise ConfigError(f"router.record_trace: {path} cannot be written: {exc}") from None
        self._thread = threading.Thread(target=self._run, name="trace-file", daemon=True)
        self._thread.start()

    def put(self, *noted: object) -> bool:
        """False where the line is dropped: the file has its size, or the disk is behind."""
        if self._is_full:
            return False
        try:
            self._queue.put_nowait(noted)  # type: ignore[arg-type]
        except Full:
            return False
        return True

    def close(self) -> None:
        """Waits for the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        namer, written = Namer(), 0
        with contextlib.closing(self._file):
            while (noted := self._queue.get()) is not None:
                received_s, prompt_ids, salt, output_tokens = noted
                if self._is_full:
                    continue
                line = trace_line(received_s - self._start_s, prompt_ids, namer.ids(prompt_ids, salt), output_tokens)
                try:
                    if written + len(line) <= self._max_bytes:
                        written += self._file.write(line)
                        if self._queue.empty():
                            self._file.flush()
                        continue
                    _log.warning("the recorded trace has its %d bytes: no more is written", self._max_bytes)
                except OSError as exc:
                    _log.warning("the recorded trace ends here: %s", exc)
                self._is_full = True
