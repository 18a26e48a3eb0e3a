"""A task that misses a cancellation is ended all the same."""

from __future__ import annotations

import asyncio

from services.protocol.tasks import end


async def test_a_loop_that_takes_a_cancellation_for_a_failed_call_ends_with_a_later_one() -> None:
    missed = 0

    async def loop() -> None:
        nonlocal missed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if missed == 2:
                    raise
                missed += 1

    deaf, plain = asyncio.create_task(loop()), asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end(deaf, plain)
    assert missed == 2
    assert deaf.cancelled()
    assert plain.cancelled()


async def test_nothing_to_end_and_what_has_ended_are_fine() -> None:
    async def fails() -> None:
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end(task)
    await end()
