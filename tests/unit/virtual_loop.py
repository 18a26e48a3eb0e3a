"""An event loop whose clock jumps to the next timer instead of waiting for it: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.BaseSelector):
    """Looks at the real files without waiting; the time it would have waited is added to the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is left to happen: the test would wait for ever")
            self.now_s += max(0.0, timeout)
        return ready

    def register(self, *arguments: Any) -> selectors.SelectorKey:
        return self._real.register(*arguments)

    def unregister(self, file: Any) -> selectors.SelectorKey:
        return self._real.unregister(file)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
