"""Single situations of the pool; `tests/property/test_pool.py` has the model."""

from __future__ import annotations

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.errors import NeverFits, OutOfBlocks
from kvstore.pool import BlockPool, PoolCounts
from kvstore.runs import group_runs

ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="float32", block_size=1, layout_version=1)


def named(pool: BlockPool, owner: str, tokens: list[int]) -> list[bytes]:
    names = block_names(tokens, 1, ROOT)
    pool.acquire(owner, len(names), names)
    for i, name in enumerate(names):
        pool.name_block(owner, i, name, names[i - 1] if i else ROOT)
    return names


def test_what_comes_and_goes_between_two_calls_is_no_event() -> None:
    pool = BlockPool(2)
    (name,) = block_names([1], 1, ROOT)
    pool.acquire("a", 1)
    pool.name_block("a", 0, name, ROOT)
    pool.release("a", quarantine=True)
    assert pool.take_events() == ([], [])
    pool.acquire("b", 1)
    pool.name_block("b", 0, name, ROOT)
    assert pool.take_events() == ([(name, ROOT)], [])
    assert pool.take_events() == ([], [])
    pool.release("b", quarantine=True)
    pool.unquarantine("a")
    pool.acquire("c", 1)
    pool.name_block("c", 0, name, ROOT)
    assert pool.take_events() == ([], [])  # it went and came


def test_a_sequence_longer_than_the_pool_never_fits() -> None:
    pool = BlockPool(4)
    assert not pool.can_acquire(5)
    with pytest.raises(NeverFits, match=r"5 KV blocks are needed, the pool has 4 \(engine\.num_blocks\)"):
        pool.acquire("a", 5)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_a_full_pool_refuses_at_once_and_keeps_its_state() -> None:
    pool = BlockPool(4)
    pool.acquire("a", 3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks are needed, 1 too many: 1 of 4 are free and 0 cached"):
        pool.acquire("b", 2)
    with pytest.raises(OutOfBlocks):
        pool.extend("a", 2)
    assert pool.counts() == PoolCounts(total=4, free=1, used=3, cached=0, reserved=0, quarantined=0)
    with pytest.raises(KeyError):
        pool.block_ids("b")
    with pytest.raises(ValueError, match="already"):
        pool.acquire("a", 1)


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(8, prefix_cache=False)
    names = named(pool, "a", [1, 2, 3])
    pool.release("a")
    assert pool.lookup(names) == 0
    assert pool.acquire("b", 3, names).cached_blocks == 0
    assert pool.take_events() == ([], [])
    assert pool.counts() == PoolCounts(total=8, free=5, used=3, cached=0, reserved=0, quarantined=0)


def test_the_longest_idle_run_goes_first_and_from_its_end() -> None:
    pool = BlockPool(7)
    old, shared = named(pool, "old", [1, 2, 3]), named(pool, "new", [1, 5, 6])
    pool.release("old")
    pool.release("new")
    assert pool.counts().cached == 5
    pool.acquire("x", 3)
    assert (pool.lookup(old), pool.lookup(shared)) == (2, 3)  # two were free, the oldest leaf makes three
    pool.acquire("y", 2)
    assert (pool.lookup(old), pool.lookup(shared)) == (1, 2)  # then 2, then 6: the prefix of both stays to the last
    pool.check()


def test_a_prefix_in_use_elsewhere_outlives_the_owner_of_its_twin() -> None:
    """Two owners compute one prefix at once: the second's blocks are nameless, what follows them is still found."""
    pool = BlockPool(8)
    names = block_names([1, 2, 3], 1, ROOT)
    first, second = pool.acquire("first", 2), pool.acquire("second", 3)
    for owner in ("first", "second"):
        for i in range(2):
            pool.name_block(owner, i, names[i], names[i - 1] if i else ROOT)
    pool.name_block("second", 2, names[2], names[1])
    pool.release("first")
    assert pool.counts() == PoolCounts(total=8, free=3, used=5, cached=0, reserved=0, quarantined=0)
    pool.acquire("hungry", 3)
    assert pool.lookup(names) == 3
    pool.release("second")
    assert pool.counts() == PoolCounts(total=8, free=2, used=3, cached=3, reserved=0, quarantined=0)
    hit = pool.acquire("third", 3, names)
    assert hit.block_ids == (*first.block_ids, second.block_ids[2])
    pool.check()


def test_quarantined_blocks_are_not_given_out_before_the_fence() -> None:
    pool = BlockPool(6)
    names = named(pool, "source", [1, 2, 3])
    shared = pool.acquire("other", 2, names[:2])
    assert shared.cached_blocks == 2
    pool.release("source", quarantine=True)
    assert pool.counts() == PoolCounts(total=6, free=3, used=2, cached=0, reserved=0, quarantined=1)
    assert pool.lookup(names) == 2
    pool.release("other")  # its blocks are in flight as well, under the first owner's ticket
    assert pool.counts() == PoolCounts(total=6, free=3, used=0, cached=0, reserved=0, quarantined=3)
    assert pool.lookup(names) == 0
    with pytest.raises(OutOfBlocks):
        pool.acquire("next", 4)
    pool.unquarantine("source")
    pool.unquarantine("source")
    assert pool.acquire("next", 6).block_ids == tuple(range(6))


def test_reserved_blocks_become_used_by_activation() -> None:
    pool = BlockPool(6)
    names = named(pool, "a", [1, 2])
    pool.release("a")
    pool.acquire("b", 4, names, reserved=True)
    assert pool.counts() == PoolCounts(total=6, free=2, used=2, cached=0, reserved=2, quarantined=0)
    pool.extend("b")
    assert pool.counts().reserved == 3
    pool.activate("b")
    pool.activate("b")
    assert pool.counts() == PoolCounts(total=6, free=1, used=5, cached=0, reserved=0, quarantined=0)
    pool.extend("b")
    assert pool.counts().used == 6


def test_names_out_of_order_or_changed_are_refused() -> None:
    pool = BlockPool(4)
    names = block_names([1, 2, 3], 1, ROOT)
    pool.acquire("a", 2)
    with pytest.raises(ValueError, match="0 are"):
        pool.name_block("a", 1, names[1], names[0])
    pool.name_block("a", 0, names[0], ROOT)
    with pytest.raises(ValueError, match="another name"):
        pool.name_block("a", 0, names[1], ROOT)
    with pytest.raises(ValueError, match="does not follow"):
        pool.name_block("a", 1, names[1], names[2])
    pool.name_block("a", 1, names[1], names[0])
    with pytest.raises(ValueError, match="block 2 of 2"):
        pool.name_block("a", 2, names[2], names[1])
    pool.acquire("b", 1)
    with pytest.raises(ValueError, match="follows another block"):
        pool.name_block("b", 0, names[1], ROOT)  # resident, but not as a first block
    pool.check()


def test_names_that_are_no_chain_hit_nothing_wrong() -> None:
    pool = BlockPool(8)
    names = named(pool, "a", [1, 2, 3])
    assert pool.acquire("b", 2, [names[1], names[2]]).cached_blocks == 0
    assert pool.acquire("c", 3, [names[0], names[2]]).cached_blocks == 1
    pool.check()


def test_no_more_is_reused_than_was_asked_for() -> None:
    pool = BlockPool(8)
    names = named(pool, "a", [1, 2, 3])
    got = pool.acquire("b", 2, names)
    assert (got.block_ids, got.cached_blocks) == (pool.block_ids("a")[:2], 2)
    assert pool.acquire("c", 0, names).block_ids == ()
    with pytest.raises(ValueError, match="num_blocks"):
        pool.acquire("d", -1, names)
    pool.check()


class CountingNames(list[bytes]):
    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(index)


def test_lookup_bisects() -> None:
    pool = BlockPool(10_000)
    names = named(pool, "a", list(range(10_000)))
    for resident in (0, 1, 4_321, 9_999, 10_000):
        chain = CountingNames(names[:resident] + block_names(range(10_000 - resident), 1, names[0]))
        assert pool.lookup(chain) == resident
        assert chain.reads <= 14


def test_a_sequence_grows_in_place() -> None:
    pool = BlockPool(64)
    pool.acquire("hole", 3)
    first = pool.acquire("a", 5).block_ids
    pool.acquire("gap", 10)
    pool.acquire("b", 5)
    pool.release("hole")  # a better fit, and elsewhere
    pool.release("gap")
    for _ in range(10):
        pool.extend("a")
    assert group_runs(pool.block_ids("a")) == [(first[0], 15)]
    pool.extend("a")
    assert len(group_runs(pool.block_ids("a"))) == 2


def test_a_fork_refers_to_the_same_blocks_and_adds_its_own() -> None:
    pool = BlockPool(6)
    names = named(pool, "a", [1, 2])
    (tail,) = pool.extend("a")
    table = pool.fork("a", "b", 2, 1)
    assert table == pool.block_ids("b")
    assert table[:2] == pool.block_ids("a")[:2]
    assert table[2] not in pool.block_ids("a")
    assert pool.counts().used == 4
    pool.release("a")
    assert pool.counts() == PoolCounts(total=6, free=3, used=3, cached=0, reserved=0, quarantined=0)
    assert pool.lookup(names) == 2
    assert tail in pool.acquire("c", 3).block_ids
    pool.check()


def test_a_fork_that_finds_no_block_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.acquire("a", 3)
    with pytest.raises(OutOfBlocks):
        pool.fork("a", "b", 2, 1)
    assert pool.counts().used == 3
    assert pool.fork("a", "b", 2) == pool.block_ids("a")[:2]
    with pytest.raises(ValueError, match="cannot share"):
        pool.fork("a", "b", 2)
    with pytest.raises(ValueError, match="cannot share"):
        pool.fork("a", "c", 4)
    pool.check()


def test_blocks_shared_before_they_have_a_name_never_get_one() -> None:
    pool = BlockPool(4)
    names = block_names([1, 2], 1, ROOT)
    pool.acquire("a", 2)
    pool.name_block("a", 0, names[0], ROOT)
    pool.fork("a", "b", 2)
    for owner in ("a", "b"):
        pool.name_block(owner, 0, names[0], ROOT)
        pool.name_block(owner, 1, names[1], names[0])
    assert pool.lookup(names) == 1
    pool.check()


def test_reserved_blocks_are_not_shared() -> None:
    pool = BlockPool(4)
    pool.acquire("a", 2, reserved=True)
    with pytest.raises(ValueError, match="cannot share"):
        pool.fork("a", "b", 1)
    pool.activate("a")
    pool.fork("a", "b", 1)
    pool.check()


def test_shared_blocks_of_a_quarantined_owner_are_free_when_the_other_lets_go_and_the_fence_came() -> None:
    pool = BlockPool(4)
    named(pool, "a", [1, 2])
    pool.fork("a", "b", 2, 1)
    pool.release("a", quarantine=True)
    assert pool.counts().quarantined == 0
    pool.release("b")
    assert pool.counts() == PoolCounts(total=4, free=2, used=0, cached=0, reserved=0, quarantined=2)
    pool.unquarantine("a")
    assert pool.counts().free == 4
    pool.check()
