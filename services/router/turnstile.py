"""Bounds what a burst of requests takes of one turn of the event loop, so that running streams go on meanwhile.

asyncio runs all that is ready before it looks at sockets and timers again: five hundred requests that come at once, or
five hundred tokens of one message, would be one long turn. `Turnstile` lets a few requests begin in each turn, `parts`
cuts a message of a worker into pieces for one turn each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from services.protocol.proto import worker_pb2

STARTS = 8
"""Requests that begin in one turn: reading, checking and routing one takes about a millisecond."""
OUTPUTS = 64
"""Outputs of a message that are handed over in one turn: writing one token takes about 0.1 ms."""


class Turnstile:
    """First come, first through."""

    def __init__(self, width: int = STARTS) -> None:
        self._width = width
        self._left = width
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_armed = False

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Returns at once where fewer than ``width`` did in this turn of the loop, else in one of the next."""
        if self._left and not self._waiting:
            self._left -= 1
            self._arm()
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._arm()
        await future

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_armed = False
        self._left = self._width
        while self._left and self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # its request has not been cancelled
                future.set_result(None)
                self._left -= 1
        if self._left < self._width:
            self._arm()


def parts(message: worker_pb2.WorkerMessage, size: int = OUTPUTS) -> Iterator[worker_pb2.WorkerMessage]:
    """The message with at most ``size`` outputs at a time, in order; all else comes with the last of them."""
    outputs = list(message.outputs)
    if len(outputs) > size:
        whole, message = message, worker_pb2.WorkerMessage()
        message.CopyFrom(whole)
        del message.outputs[:]
        while len(outputs) > size:
            yield worker_pb2.WorkerMessage(worker_id=whole.worker_id, epoch=whole.epoch, outputs=outputs[:size])
            outputs = outputs[size:]
        message.outputs.extend(outputs)
    yield message
