"""Background tasks that end when they are told to."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them and wait until each has ended; what they raise is dropped.

    A loop around a call of redis-py or grpc.aio may miss a cancellation: now and then the call, broken off while it
    connects or writes, ends with an error of its own. So whoever has not ended is cancelled again.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
