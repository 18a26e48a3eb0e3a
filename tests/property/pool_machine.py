"""A model of the pool that keeps dicts and lists and searches them in full, driven beside the real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blocks import block_names, extend_name, namespace_root
from kvstore.errors import NeverFits, OutOfBlocks
from kvstore.pool import BlockPool, PoolCounts
from kvstore.runs import group_runs

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
    stays_nameless: bool = False


@dataclass
class Resident:
    block: int
    parent: bytes
    idle_since: int = 0
    uses: int = 0  # how often it was found; stays 0 where that does not matter

    @property
    def age(self) -> tuple[int, int]:
        return self.uses, self.idle_since


class PoolMachine(RuleBasedStateMachine):
    """Owners with prompts over two tokens come, grow, are named, leave, and are quarantined."""

    @initialize(
        num_blocks=st.sampled_from([1, 4, 8, 10, 12, 14, 16, 20, 28, 40]), eviction=st.sampled_from(["lru", "lfu"])
    )
    def start(self, num_blocks: int, eviction: str) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, eviction=eviction)
        self.counts_uses = eviction == "lfu"
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
        """Only idle blocks, the least used or longest idle first, leaves first, and hardly more than the need."""
        free, cached = self.free(), self.cached() - {self.resident[name].block for name in hits}
        removed = self.take_over()
        runs_needed = len(group_runs(free)) if len(free) < need else fewest_runs(free, need)
        if len(free) >= need and runs_needed <= 4:
            assert not removed
        assert len(removed) <= max(0, need - len(free)) + min(3 * need + 256, len(cached) // 8)
        evicted = [self.resident.pop(name) for name in removed]
        assert {entry.block for entry in evicted} <= cached
        rest = [entry.age for entry in self.resident.values() if entry.block in cached]
        assert not evicted or not rest or max(entry.age for entry in evicted) <= min(rest)
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
            self.resident[name].uses += self.counts_uses
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
            if entry.stays_nameless:
                break
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
    @rule(pick=picks, shared=st.integers(0, 8), fresh=st.integers(0, 3))
    def fork(self, pick: int, shared: int, fresh: int) -> None:
        """Another owner of the first blocks: it has their names, and no other names for them."""
        owner = self.some_owner(pick)
        entry = self.owners[owner]
        shared = min(shared, len(entry.blocks))
        self.serial += 1
        new_owner, before = f"owner-{self.serial}", self.pool.counts()
        refused = ValueError if entry.is_reserved else OutOfBlocks
        if entry.is_reserved or fresh > len(self.free()) + len(self.cached()):
            with pytest.raises(refused):
                self.pool.fork(owner, new_owner, shared, fresh)
            assert self.pool.counts() == before
            return
        got = list(self.pool.fork(owner, new_owner, shared, fresh))
        assert got[:shared] == entry.blocks[:shared]
        self.take_over_evictions(fresh, [])
        self.check_fresh(got[shared:], fresh)
        is_nameless = len(entry.names) < shared
        entry.stays_nameless |= is_nameless
        tokens = [*entry.tokens[:shared], *(self.serial % 2 for _ in range(fresh))]
        self.owners[new_owner] = ModelOwner(got, entry.names[:shared], tokens, stays_nameless=is_nameless)

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
