"""What every index does: in this process, and in a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import IndexUnavailable
from kvstore.index.base import (
    MAX_NAMES_PER_BATCH,
    MAX_RECORD_BYTES,
    BlockIndex,
    EventBatch,
    Snapshot,
    Tier,
    WorkerRecord,
    split_names,
)
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis import RedisIndex

MakeIndex = Callable[..., BlockIndex]
ME = ("worker-1", "epoch-1")
EMPTY = Snapshot(0, frozenset())
_namespaces = itertools.count()


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def names(*numbers: int) -> list[bytes]:
    return [name(n) for n in numbers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    server = EmbeddedValkey()
    yield await server.start(tmp_path_factory.mktemp("valkey"))
    await server.stop()


@pytest.fixture(params=["memory", "valkey"])
async def make_index(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[MakeIndex]:
    """Makes indexes that share one store, as processes do."""
    made: list[BlockIndex] = []
    namespace = f"test-{next(_namespaces)}"

    def make(ttl_s: float = 15.0, **options: int) -> BlockIndex:
        if request.param == "memory":
            if not made:
                made.append(MemoryIndex(ttl_s, **options))
            return made[0]
        made.append(RedisIndex(valkey_url, namespace, ttl_s, **options))
        return made[-1]

    yield make
    for index in made:
        await index.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def read_all(index: BlockIndex, worker: tuple[str, str], after: int = 0) -> list[EventBatch]:
    batches: list[EventBatch] = []
    while found := await index.read({worker: batches[-1].seq if batches else after}, 0):
        batches += found
    return batches


def replayed(batches: list[EventBatch], start: Snapshot = EMPTY) -> dict[int, frozenset[bytes]]:
    """The block set after each batch."""
    held, states = set(start.names), {start.seq: start.names}
    for batch in batches:
        held = set() if batch.cleared else held
        held |= set(batch.stored)
        held -= set(batch.removed)
        states[batch.seq] = frozenset(held)
    return states


async def test_batches_are_numbered_without_holes(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, names(1, 2), [])
    await index.publish(*ME, names(3), names(1))
    await index.publish("worker-2", "epoch-1", names(9), [])
    await index.publish(*ME, [], names(2))
    assert await read_all(make_index(), ME) == [
        EventBatch(*ME, 1, tuple(names(1, 2)), ()),
        EventBatch(*ME, 2, tuple(names(3)), tuple(names(1))),
        EventBatch(*ME, 3, (), tuple(names(2))),
    ]
    assert await index.snapshot(*ME) == Snapshot(3, frozenset(names(3)))


async def test_nothing_to_say_makes_no_batch(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, [], [])
    assert await index.snapshot(*ME) == EMPTY
    assert await index.read({ME: 0}, 0) == []
    assert not await index.holds(*ME)


async def test_a_name_in_both_is_removed(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, names(1, 2, 2), names(2))
    assert await index.snapshot(*ME) == Snapshot(1, frozenset(names(1)))
    assert replayed(await read_all(index, ME))[1] == frozenset(names(1))


async def test_a_name_of_another_length_is_refused(make_index: MakeIndex) -> None:
    index = make_index()
    for stored, removed in (([b"short"], []), ([], [b"x" * 17]), ([name(1), b""], [])):
        with pytest.raises(ValueError, match="16 bytes"):
            await index.publish(*ME, stored, removed)
    assert await index.snapshot(*ME) == EMPTY


async def test_a_large_change_becomes_several_batches(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, names(*range(10_000)), [])
    await index.publish(*ME, names(*range(10_000, 12_000)), names(*range(5_000)))
    batches = await read_all(index, ME)
    assert [batch.seq for batch in batches] == [1, 2, 3, 4, 5]
    assert all(len(batch.stored) + len(batch.removed) <= MAX_NAMES_PER_BATCH for batch in batches)
    expected = frozenset(names(*range(5_000, 12_000)))
    assert replayed(batches)[5] == expected
    assert await index.snapshot(*ME) == Snapshot(5, expected)


async def test_a_reader_gets_what_comes_while_it_waits(make_index: MakeIndex) -> None:
    reader, writer = make_index(), make_index()
    await writer.publish(*ME, names(1), [])
    other = ("worker-2", "e")
    waiting = asyncio.create_task(reader.read({ME: 1, other: 0}, 20))
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    await writer.publish(*other, names(5), [])
    async with asyncio.timeout(10):
        assert await waiting == [EventBatch(*other, 1, tuple(names(5)), ())]
        assert await reader.read({ME: 1}, 0.05) == []
        assert await reader.read({}, 0.05) == []


async def test_a_snapshot_is_the_set_after_its_batch(make_index: MakeIndex) -> None:
    rng, index, reader = random.Random(3), make_index(), make_index()
    done = False

    async def publish() -> None:
        nonlocal done
        for step in range(80):
            if step == 40:
                await index.clear(*ME)
            stored = names(*(rng.randrange(200) for _ in range(rng.randrange(20))))
            await index.publish(*ME, stored, names(*(rng.randrange(200) for _ in range(rng.randrange(20)))))
            await asyncio.sleep(0)
        done = True

    publishing = asyncio.create_task(publish())
    snapshots = []
    while not done:
        snapshots.append(await reader.snapshot(*ME))
        await asyncio.sleep(0)
    await publishing
    states = replayed(await read_all(reader, ME))
    assert sorted(states) == list(range(max(states) + 1))
    assert len({snapshot.seq for snapshot in snapshots}) > 5
    for snapshot in snapshots:
        assert snapshot.names == states[snapshot.seq]


async def test_a_trimmed_stream_shows_as_a_gap_that_a_snapshot_repairs(make_index: MakeIndex) -> None:
    index = make_index(max_batches=10)
    for number in range(300):
        await index.publish(*ME, names(number), names(number - 7) if number >= 7 else [])
    batches = await read_all(index, ME, after=2)
    numbers = [batch.seq for batch in batches]
    assert numbers[0] > 3
    assert numbers == list(range(numbers[0], 301))
    assert len(numbers) >= 10
    snapshot = await index.snapshot(*ME)
    assert snapshot == Snapshot(300, frozenset(names(*range(293, 300))))
    await index.publish(*ME, names(1000), [])
    assert [batch.seq for batch in await read_all(index, ME, after=snapshot.seq)] == [301]


async def test_clear_empties_the_set_and_goes_on_counting(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, names(1, 2), [])
    await index.clear(*ME)
    assert await index.snapshot(*ME) == Snapshot(2, frozenset())
    await index.publish(*ME, names(3), [])
    assert await read_all(index, ME, after=1) == [
        EventBatch(*ME, 2, (), (), cleared=True),
        EventBatch(*ME, 3, tuple(names(3)), ()),
    ]
    assert await index.holds(*ME)
    await index.publish(*ME, [], names(3))
    assert await index.holds(*ME)  # empty is not lost


async def test_workers_are_listed_with_what_they_announced(make_index: MakeIndex) -> None:
    index, reader = make_index(), make_index()
    assert await reader.workers() == []
    records = [WorkerRecord("b", "1", b"\x00payload"), WorkerRecord("a:x/é", "2:3", b"")]
    for record in records:
        await index.announce(record, b"load of " + record.worker_id.encode())
    assert await reader.workers() == [records[1], records[0]]
    assert await reader.load("b") == b"load of b"
    assert await reader.load("nobody") == b""
    await index.announce(records[0], b"later")
    assert await reader.load("b") == b"later"
    assert len(await reader.workers()) == 2


async def test_records_without_ids_or_too_large_are_refused(make_index: MakeIndex) -> None:
    index = make_index()
    for record, load in (
        (WorkerRecord("", "e", b""), b""),
        (WorkerRecord("w", "", b""), b""),
        (WorkerRecord("w", "e", b"x" * (MAX_RECORD_BYTES + 1)), b""),
        (WorkerRecord("w", "e", b""), b"x" * (MAX_RECORD_BYTES + 1)),
    ):
        with pytest.raises(ValueError, match=r"need|may have"):
            await index.announce(record, load)
    assert await index.workers() == []


async def test_a_new_epoch_takes_the_worker_over(make_index: MakeIndex) -> None:
    old, new = make_index(), make_index()
    await old.announce(WorkerRecord("w", "old", b"1"), b"")
    await old.publish("w", "old", names(1), [])
    await new.publish("w", "new", names(2), [])
    await new.announce(WorkerRecord("w", "new", b"2"), b"")
    assert await old.workers() == [WorkerRecord("w", "new", b"2")]
    assert await new.snapshot("w", "old") == EMPTY
    assert await new.snapshot("w", "new") == Snapshot(1, frozenset(names(2)))
    await old.withdraw("w", "old")  # late
    assert await new.workers() == [WorkerRecord("w", "new", b"2")]
    assert await new.snapshot("w", "new") == Snapshot(1, frozenset(names(2)))


async def test_a_withdrawn_worker_is_gone(make_index: MakeIndex) -> None:
    index = make_index()
    for worker in ("w", "v"):
        await index.announce(WorkerRecord(worker, "e", b""), b"load")
        await index.publish(worker, "e", names(1), [])
    await index.withdraw("w", "e")
    await index.withdraw("w", "e")
    assert await index.workers() == [WorkerRecord("v", "e", b"")]
    assert await index.load("w") == b""
    assert await index.snapshot("w", "e") == EMPTY
    assert not await index.holds("w", "e")
    assert await index.snapshot("v", "e") == Snapshot(1, frozenset(names(1)))


async def test_ids_cannot_run_into_each_other(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish("a:b", "c", names(1), [])
    await index.publish("a", "b:c", names(2), [])
    assert (await index.snapshot("a:b", "c")).names == frozenset(names(1))
    assert (await index.snapshot("a", "b:c")).names == frozenset(names(2))
    batches = await index.read({("a:b", "c"): 0, ("a", "b:c"): 0}, 0)
    assert {(batch.worker_id, batch.epoch) for batch in batches} == {("a:b", "c"), ("a", "b:c")}


async def test_a_silent_worker_expires_and_must_publish_anew(make_index: MakeIndex) -> None:
    index, reader = make_index(ttl_s=0.3), make_index(ttl_s=0.3)
    await index.announce(WorkerRecord(*ME, b"p"), b"load")
    await index.publish(*ME, names(1), [])
    await index.publish(*ME, names(2), [])

    async def gone() -> bool:
        return not await reader.workers() and not await index.holds(*ME)

    await until(gone)
    assert await reader.load(ME[0]) == b""
    assert await reader.snapshot(*ME) == EMPTY
    with pytest.raises(IndexUnavailable, match="published again"):
        await index.publish(*ME, names(3), [])
    assert not await index.holds(*ME)  # a part of the set would be worse than none
    await index.clear(*ME)
    await index.publish(*ME, names(1, 2, 3), [])
    batches = await reader.read({ME: 2}, 0)
    assert batches[0].seq > 3  # a reader that knew batch 2 sees a hole
    assert [batch.seq for batch in batches] == list(range(batches[0].seq, batches[0].seq + len(batches)))
    assert (await reader.snapshot(*ME)).names == frozenset(names(1, 2, 3))


async def test_a_reader_that_repairs_gaps_ends_with_the_publishers_set(make_index: MakeIndex) -> None:
    rng, index, reader = random.Random(11), make_index(max_batches=5), make_index(max_batches=5)
    truth: set[bytes] = set()
    seen = EMPTY
    repairs = 0
    for _ in range(12):
        for _ in range(rng.choice([1, 3, 250])):
            stored, removed = names(*(rng.randrange(50) for _ in range(3))), names(rng.randrange(50))
            await index.publish(*ME, stored, removed)
            truth = (truth | set(stored)) - set(removed)
        for batch in await reader.read({ME: seen.seq}, 0):
            if batch.seq != seen.seq + 1:
                seen = await reader.snapshot(*ME)
                repairs += 1
                break
            seen = Snapshot(batch.seq, replayed([batch], seen)[batch.seq])
        while found := await reader.read({ME: seen.seq}, 0):
            seen = Snapshot(found[-1].seq, replayed(found, seen)[found[-1].seq])
        assert seen.names == truth
    assert repairs


@given(
    st.lists(st.integers(0, 30), max_size=12).map(lambda ns: names(*ns)),
    st.lists(st.integers(0, 30), max_size=12).map(lambda ns: names(*ns)),
)
def test_pieces_of_a_change_are_the_change(stored: list[bytes], removed: list[bytes]) -> None:
    for before in (set[bytes](), set(names(*range(31)))):
        held = set(before)
        for new, gone in split_names(stored, removed):
            assert new or gone
            assert not set(new) & set(gone)
            held = (held | set(new)) - set(gone)
        assert held == (before | set(stored)) - set(removed)


async def test_time_to_live_counts_from_the_last_announce() -> None:
    now_s = [0.0]
    index = MemoryIndex(10.0, clock=lambda: now_s[0])
    await index.announce(WorkerRecord(*ME, b""), b"l")
    await index.publish(*ME, names(1), [])
    for now_s[0] in (9.0, 18.0, 27.0):
        await index.announce(WorkerRecord(*ME, b""), b"l")
    assert await index.holds(*ME)
    now_s[0] = 37.1
    assert await index.workers() == []
    assert not await index.holds(*ME)


async def test_tiers_are_told_apart_in_batches_and_snapshots(make_index: MakeIndex) -> None:
    index = make_index()
    await index.publish(*ME, names(1, 2), [])
    await index.publish(*ME, names(1, 2, 3), [], tier=Tier.HOST)
    await index.publish(*ME, [], names(2))
    await index.publish(*ME, names(4), names(3), tier=Tier.HOST)
    assert [(b.seq, b.tier) for b in await read_all(index, ME)] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert await make_index().snapshot(*ME) == Snapshot(4, frozenset(names(1)), {Tier.HOST: frozenset(names(1, 2, 4))})
    await index.clear(*ME)
    assert await index.snapshot(*ME) == Snapshot(5, frozenset())
