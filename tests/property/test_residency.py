"""The router's sets of block names against plain sets: any order of adding, removing, clearing and forgetting."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.blocks import block_names
from services.router import names as names_module
from services.router.names import NameSet, common_depth
from services.router.residency import SPECULATIVE_S, Residency, depths, forget_beyond, with_room

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.lists(st.integers(0, 60), max_size=30)), max_size=30
)


@untimed
@given(CHANGES)
def test_a_name_set_is_a_set(changes: list[tuple[str, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names_module, "SLOTS", 3)  # many small buckets, and full ones
        patch.setattr(names_module, "MEAN_NAMES", 2)
        small, plain = NameSet(), set[bytes]()
        for kind, numbers in changes:
            batch = [digest(n) for n in numbers]
            if kind == "add":
                small.update(batch)
                plain.update(batch)
            else:
                small.difference_update(batch)
                plain.difference_update(batch)
            assert len(small) == len(plain)
            assert [digest(n) in small for n in range(61)] == [digest(n) in plain for n in range(61)]
        assert small.same_as(NameSet(plain))
        assert not small.same_as(NameSet({*plain, digest(99)}))


def test_twenty_thousand_names_take_about_twelve_bytes_each_and_all_are_found() -> None:
    held = [digest(n) for n in range(20_000)]
    small = NameSet(held[:10], expected=20_000)
    small.update(held)
    assert all(name in small for name in held)
    assert not any(digest(n) in small for n in range(20_000, 40_000))
    assert small.memory_bytes / len(small) < 13
    small.difference_update(held[:19_000])
    assert [name in small for name in held] == [False] * 19_000 + [True] * 1_000


@untimed
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_two_prompts_share_what_comes_before_their_first_difference(length: int, other: int, parting: int) -> None:
    here = [digest(n) for n in range(length)]
    there = [digest(n if n < parting else n + 1000) for n in range(other)]
    shared = min(length, other, parting)
    assert common_depth(here, there, 0, min(length, other)) == shared


CHAINS = [block_names([i] * 16 * 8, 16, bytes(16)) for i in range(3)]
CHAINS.append([*CHAINS[0][:4], *block_names([9] * 16 * 4, 16, bytes(16))])  # shares four blocks with chain 0
LENGTH = 8


class Workers(RuleBasedStateMachine):
    """Three workers: what each holds, and what it is expected to, as sets and dicts of names."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.real = [Residency(1000) for _ in range(3)]
        self.held: list[set[bytes]] = [set() for _ in range(3)]
        self.expected: list[dict[bytes, float]] = [{} for _ in range(3)]
        for r in self.real:
            r.reset(0, [])

    WHO, CHAIN, UPTO = st.integers(0, 2), st.integers(0, 3), st.integers(0, LENGTH)

    @rule(wait_s=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @rule(who=WHO, chain=CHAIN, length=UPTO)
    def store(self, who: int, chain: int, length: int) -> None:
        stored = CHAINS[chain][:length]
        if self._apply(who, stored, []):
            self.held[who].update(stored)
            for name in stored:
                self.expected[who].pop(name, None)

    @rule(who=WHO, chain=CHAIN, keep=UPTO)
    def evict_leaves(self, who: int, chain: int, keep: int) -> None:
        """A worker never evicts a block that one of its own follows."""
        below = {
            name
            for other in CHAINS
            for i, name in enumerate(other)
            if i >= keep and CHAINS[chain][keep:][:1] and CHAINS[chain][keep] in other[: i + 1]
        }
        gone = [name for name in below if name in self.held[who]]
        if self._apply(who, [], gone):
            self.held[who].difference_update(gone)

    @rule(who=WHO)
    def clear(self, who: int) -> None:
        if self.real[who].seq >= 0:
            assert self.real[who].apply(self.real[who].seq + 1, [], [], cleared=True)
            self.held[who] = set()

    @rule(who=WHO, chain=CHAIN, length=UPTO)
    def route(self, who: int, chain: int, length: int) -> None:
        names = CHAINS[chain][:length]
        self.real[who].expect(names, self.now_s)
        for name in names:
            if name not in self.held[who]:
                self.expected[who][name] = self.now_s + SPECULATIVE_S

    @rule(limit=st.integers(0, 30))
    def bound(self, limit: int) -> None:
        before = sum(map(len, self.held))
        forgotten = forget_beyond(self.real, limit)
        for who, r in enumerate(self.real):
            if r.forgotten_blocks:
                self.held[who] = set()
        left = sum(map(len, self.held))
        assert left <= limit
        assert before - left == forgotten

    @precondition(lambda self: any(r.forgotten_blocks for r in self.real))
    @rule(limit=st.integers(0, 60), chain=CHAIN, length=UPTO)
    def read_anew(self, limit: int, chain: int, length: int) -> None:
        back = with_room(self.real, limit)
        assert sum(map(len, self.real)) + sum(r.forgotten_blocks for r in back) <= max(limit, sum(map(len, self.real)))
        for who, r in enumerate(self.real):
            if r in back:
                r.reset(7, CHAINS[chain][:length])
                self.held[who] = set(CHAINS[chain][:length])
                for name in self.held[who]:
                    self.expected[who].pop(name, None)

    @invariant()
    def depths_are_those_of_a_scan(self) -> None:
        for r, held, expected in zip(self.real, self.held, self.expected, strict=True):
            assert len(r) == len(held)
            for names in CHAINS:
                depth = 0
                while depth < LENGTH and (names[depth] in held or expected.get(names[depth], 0.0) > self.now_s):
                    depth += 1
                assert {r.depth(names, self.now_s, guess) for guess in range(LENGTH + 2)} == {depth}
        for names in CHAINS:
            assert depths(self.real, names, self.now_s) == [r.depth(names, self.now_s) for r in self.real]

    def _apply(self, who: int, stored: list[bytes], removed: list[bytes]) -> bool:
        r = self.real[who]
        if r.seq < 0:
            assert not r.apply(1, stored, removed)
            return False
        assert r.apply(r.seq + 1, stored, removed)
        return True


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(untimed, max_examples=60, stateful_step_count=30)
