"""The service process's side of its transfer process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.errors import TransportUnavailable
from kvstore.process import Child
from kvstore.transfer.messages import CODEC, START_S, Start, Started, StartFailed

STOP_S = 3.0


class TransferClient:
    """Starts the transfer process and passes messages both ways.

    ``on_message`` gets every message after Started; ``on_exit`` is called once, with the exit code, when the process
    ends after it started. Its end fences all peers: nothing that it sent reads our memory any more, and nothing lands
    through it.
    """

    def __init__(self) -> None:
        self._child: Child | None = None
        self.started: Started | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    async def start(
        self,
        memory_fd: int,
        progress_fd: int,
        start: Start,
        on_message: Callable[[Any], None],
        on_exit: Callable[[int], None],
        env: Mapping[str, str] | None = None,
    ) -> Started:
        """Returns once the transport runs. ``progress_fd`` is -1 on a worker that only reads; ``env`` is added to ours.

        Raises TransportUnavailable where it cannot run here; the process is gone then.
        """
        first: asyncio.Future[Started | StartFailed] = asyncio.get_running_loop().create_future()

        def receive(message: Any) -> None:
            if first.done():
                on_message(message)
            else:
                first.set_result(message)

        def end(code: int) -> None:
            if self.started is not None:
                on_exit(code)
            elif not first.done():
                first.set_result(StartFailed(message=f"the transfer process ended with code {code}"))

        self._child = Child(CODEC, receive, end, "transfer")
        fds = [fd for fd in (memory_fd, progress_fd) if fd >= 0]
        await self._child.start("kvstore.transfer.process", (str(memory_fd), str(progress_fd)), fds, env)
        self._child.send(start)
        answer: Started | StartFailed = StartFailed(message=f"no answer within {START_S} s")
        with contextlib.suppress(TimeoutError):
            answer = await asyncio.wait_for(asyncio.shield(first), START_S)
        if not isinstance(answer, Started):
            first.cancel()
            await self.stop()
            raise TransportUnavailable(answer.message)
        self.started = answer
        return answer

    def send(self, message: Any) -> None:
        """Dropped where the process has ended; ``on_exit`` tells."""
        if self._child is not None:
            self._child.send(message)

    def kill(self) -> None:
        """The last resort that fences everything at once; ``on_exit`` follows."""
        if self._child is not None:
            self._child.kill()

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(STOP_S)
