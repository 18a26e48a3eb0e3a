"""From the engine's attention hook to the transfer process: which blocks a step fills, and each layer as it is
computed.

A SOCK_SEQPACKET pair made by the service process; a message is a few bytes, so the hook only records. Layers that
follow each other quickly share a message, since each costs the transfer process more than it costs to move a small
layer; the last layers, which nothing hides, go at once. If the transfer process is gone or slow the engine must not
wait: layers that cannot be told at once go with the next ones, and the end of the step, which says the same for all
layers, is sent with a bounded wait.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

MAX_MESSAGE_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 22
"""Room for the steps of the second in which the transfer process may be closing a Mooncake engine."""
GROUP_S = 0.008
"""Layers of so long share a message."""
_EAGER_LAYERS = 2  # the last ones of a step


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
class LayersDone:
    """Layer ``first`` and those after it, one for each time."""

    step: int
    first: int
    at_s: tuple[float, ...]  # monotonic


@dataclass(frozen=True, slots=True)
class StepEnds:
    """All layers of the step are computed."""

    step: int
    at_s: float


Progress = StepBegins | LayersDone | StepEnds


class ProgressSender:
    """The engine's end. Every call returns within ``wait_s``."""

    def __init__(self, fd: int, num_layers: int, wait_s: float = 1.0, group_s: float = GROUP_S) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)  # as far as the kernel allows
        self._eager_from = num_layers - _EAGER_LAYERS
        self._wait_s = wait_s
        self._group_s = group_s
        self._told_s = -math.inf
        self._untold: list[float] = []  # when each layer of this step was computed that was not told yet

    def begin(self, step: int, chunks: Sequence[Chunk]) -> None:
        self._untold.clear()
        self._send([0, step, [(c.seq_id, c.first, c.count, c.is_last) for c in chunks]], wait=True)

    def layer(self, step: int, layer: int, at_s: float) -> None:
        self._untold.append(at_s)
        if layer < self._eager_from and at_s - self._told_s < self._group_s:
            return
        if self._send([1, step, layer + 1 - len(self._untold), self._untold], wait=False):
            self._untold.clear()
            self._told_s = at_s

    def end(self, step: int, at_s: float) -> None:
        self._send([2, step, at_s], wait=True)

    def _send(self, message: list[object], *, wait: bool) -> bool:
        data = msgpack.packb(message)
        with contextlib.suppress(OSError):  # a dead transfer process is the service process's to notice
            try:
                self._socket.send(data)
            except BlockingIOError:
                if not (wait and select.select([], [self._socket], [], self._wait_s)[1]):
                    return False
                self._socket.send(data)
        return True


def decode(data: bytes) -> Progress:
    kind, step, *rest = msgpack.unpackb(data)
    if kind == 0:
        return StepBegins(step, tuple(Chunk(*c) for c in rest[0]))
    if kind == 1:
        return LayersDone(step, rest[0], tuple(rest[1]))
    return StepEnds(step, rest[0])
