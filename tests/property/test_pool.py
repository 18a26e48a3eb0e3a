"""The pool against the model in `pool_machine`, and its free runs and events against sets."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_machine import ROOT, PoolMachine, fewest_runs

from kvstore.blocks import block_names, extend_name
from kvstore.pool import BlockPool
from kvstore.runs import FreeRuns, group_runs

TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(12))
def test_pool_and_model_agree_through_a_long_life(seed: int) -> None:
    """The same rules, drawn so that the pool is mostly full and its blocks mostly named."""
    rng, machine = random.Random(seed), PoolMachine()
    machine.start(rng.choice([9, 12, 16, 24, 40]), "lfu" if seed % 3 == 0 else "lru")
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


@settings(max_examples=40, deadline=None)
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
