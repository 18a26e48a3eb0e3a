"""The real fake server and the real client over real sockets, on a clock that jumps: exact figures on any machine."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from services.bench.fake import Behaviour, FakeServer, Stall, start
from tests.unit.virtual_loop import VirtualLoop, _Jumping

QUIET_S = 0.0001  # real time in which loopback has delivered whatever was sent


class _Patient(_Jumping):
    """Gives bytes on their way through loopback a moment before the clock jumps."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and timeout is None:
            ready = self._real.select(1.0)
        elif not ready and timeout:
            time.sleep(QUIET_S)  # epoll itself waits whole milliseconds
            ready = self._real.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is left to happen: the test would wait for ever")
            self.now_s += max(0.0, timeout)
        return ready


class PatientLoop(VirtualLoop):
    def __init__(self) -> None:
        self._jumping = _Patient()
        asyncio.SelectorEventLoop.__init__(self, self._jumping)


def run_over_sockets(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(main)


@asynccontextmanager
async def served(slots: int = 0, **how: Any) -> AsyncIterator[tuple[FakeServer, str]]:
    """A fake server on the loop's clock, and its URL."""
    clock = asyncio.get_running_loop().time
    server = FakeServer(Behaviour(**how), [], Stall(), 50000, slots=slots, clock=clock)
    listening = await start(server, 0)
    try:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await asyncio.sleep(0.01)  # lets closed connections go
