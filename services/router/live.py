"""Answers on their way: each is watched for its client leaving, and for the router stopping.

run ──► done                        the work ended by itself
 ├────► ClientGone                  the connection closed: the work is cancelled, which frees its workers
 └────► RequestError(OVERLOADED)    the router stops and its drain time is over
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

from services.protocol.errors import ErrorCode, RequestError

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Tick = Callable[[], Awaitable[float | None]]
"""Called while the work runs; returns the seconds until it wants to be called again (None: never)."""


class ClientGone(Exception):
    """The client closed its connection. Nothing can be sent any more."""


class Live:
    """All requests of one front: open from their first byte to their last, and among these the running answers."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    def __len__(self) -> int:
        return self._open

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Holds `drained` back while the block runs."""
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive, tick: Tick | None = None) -> T:
        """The result of ``work``, which is cancelled, and awaited, before anything is raised.

        Raises:
            ClientGone: the client left.
            RequestError: of the work itself, or OVERLOADED when `end_all` ended it.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        self._tasks.add(task)
        try:
            wait_s = None if tick is None else await tick()
            while not task.done() and not gone.done():
                await asyncio.wait({task, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if tick is not None and not task.done() and not gone.done():
                    wait_s = await tick()
            if task.done() and task.cancelled() and self._is_stopping:
                raise RequestError(ErrorCode.OVERLOADED, "this router is stopping; send it again", retry_after_s=1.0)
            if task.done() and not task.cancelled():
                return task.result()
            raise ClientGone
        finally:
            self._tasks.discard(task)
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def drained(self, within_s: float) -> bool:
        """Wait until no request is open; False when the time was not enough."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """End every answer with an error that its client can read."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
