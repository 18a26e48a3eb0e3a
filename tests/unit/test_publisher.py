"""A worker's publisher over an index in memory: tiers, losses, and what the router makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvstore.blocks import block_names
from kvstore.errors import IndexUnavailable
from kvstore.index.base import Snapshot, Tier
from kvstore.index.memory import MemoryIndex
from services.engine import messages as m
from services.protocol.proto import worker_pb2
from services.router.residency import Residency
from services.worker.publisher import Publisher

NAMES = block_names(list(range(160)), 16, bytes(16))
ME = ("p0", "e1")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


class Flaky(MemoryIndex):
    is_down = False

    async def publish(self, *args: Any, **options: Any) -> None:
        if self.is_down:
            raise IndexUnavailable("down")
        await super().publish(*args, **options)


@pytest.fixture
async def index() -> Flaky:
    return Flaky(ttl_s=1e9)


@pytest.fixture
async def publisher(index: Flaky) -> AsyncIterator[Publisher]:
    registration = worker_pb2.Registration(worker_id="p0", epoch="e1")
    made = Publisher(index, lambda: registration, worker_pb2.Load, 0.05)
    made.start()
    yield made
    await made.stop()


async def holds(index: Flaky, names: list[bytes], lower: dict[int, list[bytes]]) -> None:
    wanted = (frozenset(names), {tier: frozenset(held) for tier, held in lower.items()})
    seen: list[Snapshot] = []

    async def look() -> bool:
        seen.append(await index.snapshot(*ME))
        return (seen[-1].names, seen[-1].lower) == wanted

    async with asyncio.timeout(20):
        while not await look():
            await asyncio.sleep(0.01)


async def test_each_tier_is_published_as_its_own(index: Flaky, publisher: Publisher) -> None:
    publisher.note(NAMES[:4], [])
    publisher.note(NAMES[:6], [], Tier.HOST)
    await holds(index, NAMES[:4], {Tier.HOST: NAMES[:6]})
    publisher.note([], NAMES[2:4])
    publisher.note(NAMES[6:7], NAMES[:1], Tier.HOST)
    await holds(index, NAMES[:2], {Tier.HOST: NAMES[1:7]})


async def test_a_tier_that_failed_is_told_of_as_empty(index: Flaky, publisher: Publisher) -> None:
    publisher.note(NAMES[:4], [])
    publisher.note(NAMES[:6], [], Tier.HOST)
    await holds(index, NAMES[:4], {Tier.HOST: NAMES[:6]})
    publisher.note([], [], Tier.HOST, True)
    await holds(index, NAMES[:4], {})


async def test_after_a_failure_all_tiers_are_published_anew(index: Flaky, publisher: Publisher) -> None:
    publisher.note(NAMES[:2], [])
    await holds(index, NAMES[:2], {})
    index.is_down = True
    publisher.note(NAMES[2:5], NAMES[:1])
    publisher.note(NAMES[:6], [], Tier.HOST)
    await until(lambda: not publisher.up)
    index.is_down = False
    await holds(index, NAMES[1:5], {Tier.HOST: NAMES[:6]})


def test_a_step_tells_of_the_device_first_and_then_of_the_tier() -> None:
    stored = tuple((name, bytes(16)) for name in NAMES[:2])
    step = m.StepDone(
        outputs=(),
        stored=stored,
        removed=(NAMES[3],),
        stats=m.Stats(),
        tier=m.TierEvents(tier=1, stored=(NAMES[0],), is_lost=True),
    )
    assert m.CODEC.decode(m.CODEC.encode(step)) == step
    assert list(step.changes()) == [(NAMES[:2], (NAMES[3],), 0, False), ((NAMES[0],), (), 1, True)]
    assert list(m.StepDone(outputs=(), stored=(), removed=(), stats=m.Stats()).changes()) == []


def test_what_a_lower_tier_could_complete_is_counted_from_what_is_on_the_device() -> None:
    residency = Residency(100)
    residency.reset(0, NAMES[:3])
    assert residency.apply(1, NAMES[2:7], [], tier=Tier.HOST)  # its first ones it has let go
    assert residency.apply(2, NAMES[:2], [], tier=Tier.STORE)
    assert residency.apply(3, NAMES[:9], [], tier=9)  # of a later version
    assert residency.lower_depths(NAMES, residency.depth(NAMES, 0.0)) == {"host": 7}
    assert (len(residency), residency.kept_blocks) == (3, 3 + 5 + 2 + 9)
    assert residency.apply(4, [], [], cleared=True)
    assert residency.lower_depths(NAMES, 0) == {}
    assert residency.kept_blocks == 0


def test_more_than_a_lower_tier_may_hold_asks_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.residency.LOWER_TIMES", 2)
    residency = Residency(4)
    residency.reset(0, [])
    assert residency.apply(1, NAMES[:8], [], tier=Tier.HOST)
    assert not residency.apply(2, NAMES[8:], [], tier=Tier.HOST)
