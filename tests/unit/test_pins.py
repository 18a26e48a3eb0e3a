"""Blocks that a peer reads: found by name, kept while it reads, and counted."""

from __future__ import annotations

import pytest

from kvstore.blocks import block_names
from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.engine.messages import PinBlocks, Pinned
from services.engine.pins import Pins

ROOT = b"r" * 16
NAMES = tuple(block_names(range(6 * 4), 4, ROOT))


def cached(num_names: int = 4, num_blocks: int = 6) -> BlockPool:
    """A pool that has kept the first blocks of a prompt and nothing else."""
    pool = BlockPool(num_blocks)
    pool.acquire("before", num_names)
    for i in range(num_names):
        pool.name_block("before", i, NAMES[i], NAMES[i - 1] if i else ROOT)
    pool.release("before")
    return pool


def test_the_leading_blocks_that_are_here_are_held_and_let_go_again() -> None:
    pool = cached()
    pins = Pins(pool)
    pinned = pins.pin(PinBlocks(seq_id="pull.t", names=NAMES))
    assert len(pinned.block_ids) == 4
    assert pinned.block_ids == pool.acquire("other", 4, NAMES[:4]).block_ids  # the very blocks of these names
    pool.release("other")
    assert (pool.counts().used, pool.counts().cached) == (4, 0)
    pool.check()
    assert pins.release("pull.t")
    assert (pool.counts().used, pool.counts().cached, len(pins)) == (0, 4, 0)
    pool.check()


def test_pinned_blocks_are_not_evicted_and_others_are() -> None:
    pool = cached()
    pins = Pins(pool)
    pins.pin(PinBlocks(seq_id="pull.t", names=NAMES[:2]))
    pool.acquire("hungry", 4)  # two free ones and the two that are cached and not pinned
    with pytest.raises(OutOfBlocks):
        pool.acquire("more", 1)
    assert pool.lookup(NAMES) == 2
    pool.check()


def test_what_is_not_here_pins_nothing() -> None:
    pool = cached()
    pins = Pins(pool)
    other = tuple(block_names(range(100, 116), 4, ROOT))
    assert pins.pin(PinBlocks(seq_id="pull.t", names=other)) == Pinned(seq_id="pull.t", block_ids=())
    assert not pins.release("pull.t")
    assert pool.counts().cached == 4


def test_names_that_are_no_chain_pin_nothing() -> None:
    pool = cached()
    pins = Pins(pool)
    assert pins.pin(PinBlocks(seq_id="pull.t", names=NAMES[1:3])).block_ids == ()
    assert (pool.counts().used, pool.counts().total) == (0, 6)
    pool.check()


def test_two_pulls_of_one_prompt_hold_the_same_blocks_each_for_itself() -> None:
    pool = cached()
    pins = Pins(pool)
    first = pins.pin(PinBlocks(seq_id="pull.a", names=NAMES[:4]))
    assert pins.pin(PinBlocks(seq_id="pull.b", names=NAMES[:3])).block_ids == first.block_ids[:3]
    pins.release("pull.a")
    assert pool.counts().used == 3
    assert pins.pin(PinBlocks(seq_id="pull.b", names=NAMES[:3])).block_ids == ()  # it has them already
    pins.release("pull.b")
    assert pool.counts().used == 0
    pool.check()


def test_blocks_in_use_by_a_sequence_may_be_read_at_the_same_time() -> None:
    pool = cached()
    pins = Pins(pool)
    pool.acquire("running", 5, NAMES[:4])
    pinned = pins.pin(PinBlocks(seq_id="pull.t", names=NAMES[:4]))
    pool.release("running")
    assert (pool.counts().used, len(pinned.block_ids)) == (4, 4)
    pins.release("pull.t")
    pool.check()
