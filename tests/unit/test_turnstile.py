"""A burst is spread over turns of the event loop: in order, with nobody forgotten, and others have their turns too."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from services.protocol.proto import worker_pb2
from services.router.turnstile import Turnstile, parts


async def test_a_burst_goes_through_in_order_and_a_few_in_each_turn() -> None:
    stile, turn = Turnstile(4), 0
    passed: list[tuple[int, int]] = []  # (turn, who)

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def one(who: int) -> None:
        await stile.enter()
        passed.append((turn, who))

    counter = asyncio.create_task(count())
    await asyncio.gather(*(one(i) for i in range(50)))
    counter.cancel()
    assert [who for _, who in passed] == list(range(50))
    assert max(Counter(at for at, _ in passed).values()) <= 2 * 4  # one turn's and the next's may share a count
    assert len({at for at, _ in passed}) >= 50 // 8
    assert len(stile) == 0


async def test_who_comes_alone_never_waits() -> None:
    stile = Turnstile(1)
    for _ in range(3):
        coroutine = stile.enter()
        with pytest.raises(StopIteration):
            coroutine.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_one_that_is_cancelled_takes_nobodys_turn() -> None:
    stile = Turnstile(1)
    tasks = [asyncio.create_task(stile.enter()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=5)
    assert len(done) == 6
    assert [task.cancelled() for task in tasks] == [False, True] * 3


@pytest.mark.parametrize("outputs", [0, 1, 3, 4, 9, 12])
def test_a_message_is_cut_in_order_and_its_load_comes_last(outputs: int) -> None:
    message = worker_pb2.WorkerMessage(
        worker_id="w",
        epoch="e",
        seq=7,
        outputs=[worker_pb2.Output(position=i) for i in range(outputs)],
        events=[worker_pb2.TimelineEvent(name="x")],
        load=worker_pb2.Load(step=5),
    )
    before = message.SerializeToString(deterministic=True)
    cut = list(parts(message, 4))
    assert [o.position for part in cut for o in part.outputs] == list(range(outputs))
    assert all(len(part.outputs) <= 4 and part.worker_id == "w" and part.epoch == "e" for part in cut)
    assert [part.HasField("load") for part in cut] == [False] * (len(cut) - 1) + [True]
    assert len(cut[-1].events) == 1
    assert len(cut) == max(1, -(-outputs // 4))
    assert message.SerializeToString(deterministic=True) == before
