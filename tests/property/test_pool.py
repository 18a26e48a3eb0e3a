"""The pool against a model that keeps dicts and lists and searches them in full."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blocks import block_names, extend_name, namespace_root
from kvstore.errors import NeverFits, OutOfBlocks
from kvstore.pool import BlockPool, PoolCounts
from kvstore.runs import FreeRuns, group_runs

ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="float32", block_size=1, layout_version=1)
picks = st.integers(0, 63)
prompts = st.lists(st.integers(0, 1), max_size=8)  # one token a block: many shared prefixes


@dataclass
class ModelOwner:
    blocks: list[int]
    names: list[bytes]  # those it has been given, in order
    tokens: list[int]
    reserved: set[int] = field(default_factory=set)
    is_reserved: bool = False


@dataclass
class Resident:
    block: int
    parent: bytes
    idle_since: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Owners with prompts over two tokens come, grow, are named, leave, and are quarantined."""

    @initialize(num_blocks=st.sampled_from([1, 4, 8, 10, 12, 14, 16, 20, 28, 40]))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.owners: dict[str, ModelOwner] = {}
        self.resident: dict[bytes, Resident] = {}
        self.quarantines: dict[str, list[int]] = {}
        self.reader: set[bytes] = set()  # what a reader of the events believes
        self.clock = 0
        self.serial = 0

    # what the model knows by searching

    def some_owner(self, pick: int) -> str:
        return sorted(self.owners)[pick % len(self.owners)]

    def held(self) -> set[int]:
        held = {block for owner in self.owners.values() for block in owner.blocks}
        return held | {self.resident[name].block for owner in self.owners.values() for name in owner.names}

    def quarantined(self) -> set[int]:
        return {block for blocks in self.quarantines.values() for block in blocks} - self.held()

    def cached(self) -> set[int]:
        return {entry.block for entry in self.resident.values()} - self.held()

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - self.held() - self.quarantined() - self.cached()

    def hits(self, names: list[bytes]) -> list[bytes]:
        found = []
        for name in names:
            if name not in self.resident:
                break
            found.append(name)
        return found

    def below(self, name: bytes) -> set[bytes]:
        return {name}.union(*(self.below(n) for n, entry in self.resident.items() if entry.parent == name))

    # what happened in the pool, checked and taken over

    def take_over(self) -> list[bytes]:
        stored, removed = self.pool.take_events()
        assert not set(removed) & {name for name, _ in stored}
        for name, parent in stored:
            assert name not in self.reader
            assert parent == ROOT or parent in self.reader
            self.reader.add(name)
        for name in removed:
            self.reader.remove(name)
        return removed

    def take_over_evictions(self, need: int, hits: list[bytes]) -> None:
        """Only idle blocks, the longest idle first, leaves first, and hardly more than the need."""
        free, cached = self.free(), self.cached() - {self.resident[name].block for name in hits}
        removed = self.take_over()
        runs_needed = len(group_runs(free)) if len(free) < need else fewest_runs(free, need)
        if len(free) >= need and runs_needed <= 4:
            assert not removed
        assert len(removed) <= max(0, need - len(free)) + min(3 * need + 256, len(cached) // 8)
        evicted = [self.resident.pop(name) for name in removed]
        assert {entry.block for entry in evicted} <= cached
        rest = [entry.idle_since for name, entry in self.resident.items() if entry.block in cached]
        assert max((e.idle_since for e in evicted), default=0) <= min(rest, default=self.clock)
        assert all(entry.parent == ROOT or entry.parent in self.resident for entry in self.resident.values())

    def lose_names(self, expected: set[bytes]) -> None:
        assert set(self.take_over()) == expected
        for name in expected:
            del self.resident[name]

    # rules

    @rule(prompt=prompts, spare=st.integers(0, 4), cap=st.sampled_from([8, 8, 8, 2, 0]), state=st.sampled_from("nnnur"))
    def acquire(self, prompt: list[int], spare: int, cap: int, state: str) -> None:
        """An owner comes: computed at once (n), still computing (u) or reserved (r)."""
        reserved = state == "r"
        names = block_names(prompt, 1, ROOT)
        usable, need = names[:cap], len(prompt) + spare
        hits = self.hits(usable)[:need]
        self.serial += 1
        owner = f"owner-{self.serial}"
        before = self.pool.counts()
        idle_hits = len({self.resident[name].block for name in hits} & self.cached())
        fits = need - len(hits) <= len(self.free()) + len(self.cached()) - idle_hits
        assert self.pool.lookup(names) == len(self.hits(names))
        assert self.pool.can_acquire(need, usable) == fits
        if not fits:
            with pytest.raises(NeverFits if need > self.num_blocks else OutOfBlocks):
                self.pool.acquire(owner, need, usable, reserved=reserved)
            assert self.pool.counts() == before
            return
        got = self.pool.acquire(owner, need, usable, reserved=reserved)
        assert got.cached_blocks == len(hits)
        assert list(got.block_ids[: len(hits)]) == [self.resident[name].block for name in hits]
        fresh = list(got.block_ids[len(hits) :])
        self.take_over_evictions(len(fresh), hits)
        self.check_fresh(fresh, need - len(hits))
        for name in hits:
            self.resident[name].idle_since = 0
        tokens = [*prompt, *(7 for _ in range(spare))]
        self.owners[owner] = ModelOwner(
            list(got.block_ids), hits, tokens, set(fresh) if reserved else set(), is_reserved=reserved
        )
        if state == "n":
            self.name_next(owner, len(prompt))

    def check_fresh(self, fresh: list[int], need: int) -> None:
        assert len(set(fresh)) == len(fresh) == need
        assert fresh == sorted(fresh)
        assert set(fresh) <= self.free()

    @precondition(lambda self: self.owners)
    @rule(pick=picks, tokens=st.lists(st.integers(0, 1), max_size=3))
    def extend(self, pick: int, tokens: list[int]) -> None:
        owner, count = self.some_owner(pick), len(tokens)
        before = self.pool.counts()
        if count > len(self.free()) + len(self.cached()):
            with pytest.raises(OutOfBlocks):
                self.pool.extend(owner, count)
            assert self.pool.counts() == before
            return
        fresh = list(self.pool.extend(owner, count))
        self.take_over_evictions(count, [])
        self.check_fresh(fresh, count)
        entry = self.owners[owner]
        entry.blocks += fresh
        entry.tokens += tokens
        if entry.is_reserved:
            entry.reserved |= set(fresh)

    @precondition(lambda self: self.owners)
    @rule(pick=picks, count=st.integers(1, 6))
    def name(self, pick: int, count: int) -> None:
        self.name_next(self.some_owner(pick), count)

    def name_next(self, owner: str, count: int) -> None:
        entry = self.owners[owner]
        for index in range(len(entry.names), min(len(entry.names) + count, len(entry.blocks))):
            parent = entry.names[-1] if entry.names else ROOT
            name = extend_name(parent, [entry.tokens[index]])
            if entry.is_reserved:
                with pytest.raises(ValueError, match="reserved"):
                    self.pool.name_block(owner, index, name, parent)
                return
            self.pool.name_block(owner, index, name, parent)
            self.pool.name_block(owner, index, name, parent)  # again: nothing
            entry.names.append(name)
            self.resident.setdefault(name, Resident(entry.blocks[index], parent)).idle_since = 0
        assert self.take_over() == []

    @precondition(lambda self: any(entry.is_reserved for entry in self.owners.values()))
    @rule(pick=picks)
    def activate(self, pick: int) -> None:
        owner = self.some_owner(pick)
        self.pool.activate(owner)
        self.owners[owner].reserved, self.owners[owner].is_reserved = set(), False

    @precondition(lambda self: self.owners)
    @rule(pick=picks, quarantine=st.sampled_from([False, False, False, True]))
    def release(self, pick: int, quarantine: bool) -> None:
        owner = self.some_owner(pick)
        entry = self.owners.pop(owner)
        self.pool.release(owner, quarantine=quarantine)
        self.clock += 1
        held = self.held()
        for resident in self.resident.values():
            if resident.block not in held and not resident.idle_since:
                resident.idle_since = self.clock
        if quarantine:
            self.quarantines.setdefault(owner, []).extend(entry.blocks)
        lost: set[bytes] = set()
        for name, resident in self.resident.items():
            if resident.block in self.quarantined():
                lost |= self.below(name)
        self.lose_names(lost)
        with pytest.raises(KeyError):
            self.pool.release(owner)

    @precondition(lambda self: self.quarantines)
    @rule(pick=picks)
    def unquarantine(self, pick: int) -> None:
        owner = [*sorted(self.quarantines), "nobody"][pick % (len(self.quarantines) + 1)]
        self.pool.unquarantine(owner)
        self.quarantines.pop(owner, None)

    # after each step

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.pool.check()
        reserved = set().union(*(entry.reserved for entry in self.owners.values()))
        used = self.held() - reserved
        states = (self.free(), used, self.cached(), reserved, self.quarantined())
        counts = self.pool.counts()
        assert counts == PoolCounts(self.num_blocks, *map(len, states))
        assert sum(map(len, states)) == counts.total
        assert self.reader == set(self.resident)
        for owner, entry in self.owners.items():
            assert self.pool.block_ids(owner) == tuple(entry.blocks)

    def teardown(self) -> None:
        for owner in list(self.owners):
            self.pool.release(owner, quarantine=True)
        for owner in {*self.owners, *self.quarantines}:
            self.pool.unquarantine(owner)
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total


def fewest_runs(free: set[int], need: int) -> int:
    runs = 0
    for _, count in sorted(group_runs(free), key=lambda run: -run[1]):
        if need <= 0:
            break
        need -= count
        runs += 1
    return runs


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(12))
def test_pool_and_model_agree_through_a_long_life(seed: int) -> None:
    """The same rules, drawn so that the pool is mostly full and its blocks mostly named."""
    rng, machine = random.Random(seed), PoolMachine()
    machine.start(rng.choice([9, 12, 16, 24, 40]))
    for _ in range(250):
        action, pick, owners = rng.random(), rng.randrange(64), machine.owners
        tokens = [rng.randrange(2) for _ in range(rng.randrange(9))]
        if action < 0.35 or not owners:
            machine.acquire(tokens, rng.randrange(3), rng.choice([8, 8, 8, 2]), rng.choice("nnnnnur"))
        elif action < 0.45:
            machine.extend(pick, tokens[:3])
        elif action < 0.55:
            machine.name(pick, 6)
        elif action < 0.6:
            machine.activate(pick)
        elif action < 0.92:
            machine.release(pick, rng.random() < 0.15)
        else:
            machine.unquarantine(pick)
        machine.pool_and_model_agree()
    machine.teardown()


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 40)), max_size=40))
def test_free_runs_are_a_set_that_gives_neighbours(size: int, steps: list[tuple[bool, int, int]]) -> None:
    runs, free, out = FreeRuns(size), set(range(size)), list[int]()
    for give_back, count, pick in steps:
        after = out[pick % len(out)] if out else -1
        if give_back:
            at = pick % len(out) if out else 0
            returned, out = out[at : at + count], out[:at] + out[at + count :]
            runs.add(returned)
            free |= set(returned)
        elif count <= len(free):
            fewest, grows = fewest_runs(free, count), set(range(after + 1, after + 1 + count)) <= free
            taken = runs.take(count, after)
            assert taken == sorted(set(taken))
            assert len(taken) == count
            assert set(taken) <= free
            assert len(group_runs(taken)) <= fewest
            if grows and count:
                assert taken[0] == after + 1
            free -= set(taken)
            out += taken
        assert runs.ids() == free
        assert len(runs) == len(free)
        assert runs.num_runs() == len(group_runs(free))
        for need in (1, 5, 20):
            assert runs.fits(need, 2) == (len(free) >= need and fewest_runs(free, need) <= 2)


@given(st.randoms(use_true_random=False), st.integers(1, 9))
def test_events_taken_rarely_say_the_same_as_events_taken_at_once(rng: random.Random, rarely: int) -> None:
    pools = BlockPool(12), BlockPool(12)
    readers: tuple[set[bytes], set[bytes]] = (set(), set())
    owners: list[str] = []
    for step in range(60):
        if owners and rng.random() < 0.5:
            owner, quarantine = owners.pop(rng.randrange(len(owners))), rng.random() < 0.2
            for pool in pools:
                pool.release(owner, quarantine=quarantine)
                pool.unquarantine(owner)
        else:
            names = block_names([rng.randrange(2) for _ in range(rng.randrange(1, 7))], 1, ROOT)
            if pools[0].can_acquire(len(names), names):
                owners.append(f"owner-{step}")
                for pool in pools:
                    pool.acquire(owners[-1], len(names), names)
                    for i, name in enumerate(names):
                        pool.name_block(owners[-1], i, name, names[i - 1] if i else ROOT)
        for pool, reader, every in zip(pools, readers, (1, rarely), strict=True):
            if step % every == 0 or step == 59:
                stored, removed = pool.take_events()
                fresh = {name for name, _ in stored}
                assert not fresh & reader
                assert set(removed) <= reader
                assert all(parent in reader | fresh | {ROOT} for _, parent in stored)
                reader |= fresh
                reader -= set(removed)
    assert readers[0] == readers[1]


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


def named(pool: BlockPool, owner: str, tokens: list[int]) -> list[bytes]:
    names = block_names(tokens, 1, ROOT)
    pool.acquire(owner, len(names), names)
    for i, name in enumerate(names):
        pool.name_block(owner, i, name, names[i - 1] if i else ROOT)
    return names


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


class NaiveLru:
    """Blocks in order of release, tail first; the next one out is the next one in."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = OrderedDict.fromkeys(range(num_blocks))

    def take(self, count: int) -> list[int]:
        return [self.queue.popitem(last=False)[0] for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        self.queue.update(dict.fromkeys(reversed(blocks)))


def test_a_full_pool_gives_few_runs_where_plain_lru_gives_rubble() -> None:
    """Long prompts and growing answers on a pool full of cached blocks."""
    rng, pool, naive = random.Random(20), BlockPool(3000), NaiveLru(3000)
    live: list[tuple[str, list[int], int]] = []
    ours, theirs = [], []
    serial = 0
    for step in range(400):
        while len(live) < 12:
            serial += 1
            size = rng.randrange(50, 130)
            blocks = pool.acquire(f"{serial}", size).block_ids
            mirror = naive.take(size)
            if step > 150:
                ours.append(len(group_runs(blocks)))
                theirs.append(len(group_runs(mirror)))
            live.append((f"{serial}", mirror, rng.randrange(5, 60)))
        for i, (owner, mirror, left) in enumerate(live):
            pool.extend(owner)
            mirror += naive.take(1)
            live[i] = (owner, mirror, left - 1)
        for owner, mirror, _ in [entry for entry in live if entry[2] == 0]:
            parent = ROOT
            for index in range(len(mirror)):
                name = extend_name(parent, [int(owner)])
                pool.name_block(owner, index, name, parent)
                parent = name
            pool.release(owner)
            naive.give(mirror)
        live = [entry for entry in live if entry[2] > 0]
    pool.check()
    assert len(ours) > 50
    assert pool.counts().cached > 1000
    mean_ours, mean_theirs = sum(ours) / len(ours), sum(theirs) / len(theirs)
    assert mean_ours <= 4, (mean_ours, mean_theirs)
    assert mean_ours * 8 < mean_theirs, (mean_ours, mean_theirs)
