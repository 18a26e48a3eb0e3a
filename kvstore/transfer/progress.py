"""From the engine's attention hook to the transfer process: which blocks a step fills, and each layer as it is
computed.

A SOCK_SEQPACKET pair made by the service process; a message is a few bytes, so the hook only records. If the transfer
process is gone or slow the engine must not wait: a message that cannot be sent at once is dropped, and the end of the
step, which says the same for all layers, is sent with a bounded wait.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

MAX_MESSAGE_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 22
"""Room for the steps of the second in which the transfer process may be closing a Mooncake engine."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one sequence that hold their final KV in a layer once that layer of the step is computed."""

    seq_id: str
    first: int  # index into the sequence's block list
    count: int
    is_last: bool  # the prompt ends with this chunk; its tail block is included


@dataclass(frozen=True, slots=True)
class StepBegins:
    step: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class LayerDone:
    step: int
    layer: int
    at_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class StepEnds:
    """All layers of the step are computed."""

    step: int
    at_s: float


Progress = StepBegins | LayerDone | StepEnds


class ProgressSender:
    """The engine's end. Every call returns within ``wait_s``."""

    def __init__(self, fd: int, wait_s: float = 1.0) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)  # as far as the kernel allows
        self._wait_s = wait_s

    def begin(self, step: int, chunks: Sequence[Chunk]) -> None:
        self._send([0, step, [(c.seq_id, c.first, c.count, c.is_last) for c in chunks]], wait=True)

    def layer(self, step: int, layer: int, at_s: float) -> None:
        self._send([1, step, layer, at_s], wait=False)

    def end(self, step: int, at_s: float) -> None:
        self._send([2, step, at_s], wait=True)

    def _send(self, message: list[object], *, wait: bool) -> None:
        data = msgpack.packb(message)
        with contextlib.suppress(OSError):  # a dead transfer process is the service process's to notice
            try:
                self._socket.send(data)
            except BlockingIOError:
                if wait and select.select([], [self._socket], [], self._wait_s)[1]:
                    self._socket.send(data)


def decode(data: bytes) -> Progress:
    kind, step, *rest = msgpack.unpackb(data)
    if kind == 0:
        return StepBegins(step, tuple(Chunk(*c) for c in rest[0]))
    if kind == 1:
        return LayerDone(step, rest[0], rest[1])
    return StepEnds(step, rest[0])
