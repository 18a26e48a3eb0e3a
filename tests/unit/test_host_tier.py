"""The host tier's own promises: a bound on memory, who goes first when it is full, small pieces of work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.index.base import Tier
from kvstore.pool import BlockPool
from kvstore.tensors import KVMemory
from kvstore.tier.base import Prefix, Save, Telling
from kvstore.tier.host import LOAD_BLOCKS, HostTier
from kvstore.tier.registry import TierOptions
from services.engine.messages import TierEvents
from services.engine.tiers import Tiers

SIZE = 4
GROUP = KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, block_size=SIZE, dtype="float32")
BLOCK_BYTES = GROUP.num_layers * GROUP.block_bytes
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="float32", block_size=SIZE, layout_version=1)


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    memory = KVMemory.create(KVGeometry(groups=(GROUP,), num_blocks=(64,)))
    yield memory
    memory.close()


def make(memory: KVMemory, num_blocks: int) -> HostTier:
    return HostTier(memory, TierOptions(host_bytes=num_blocks * BLOCK_BYTES + 1))


def chain(first_token: int, num_blocks: int) -> Prefix:
    tokens = [first_token, *range(num_blocks * SIZE - 1)]
    return Prefix(ROOT, tokens, block_names(tokens, SIZE, ROOT))


def save(tier: HostTier, prefix: Prefix, first: int = 0) -> None:
    for layer in range(GROUP.num_layers):
        tier.save_layer(Save(1, prefix, first, range(first, len(prefix.names))), layer)
    assert tier.saved() == [1]


def depth(tier: HostTier, prefix: Prefix) -> int:
    return tier.lookup("?", prefix) or 0


def test_memory_is_bounded_and_the_longest_idle_chain_goes_leaf_first(memory: KVMemory) -> None:
    tier = make(memory, 8)
    old, new = chain(1, 4), chain(2, 4)
    save(tier, old)
    save(tier, new)
    save(tier, chain(3, 2))
    assert (depth(tier, new), depth(tier, chain(3, 2))) == (4, 2)
    assert depth(tier, old) in (1, 2)  # a block more may go, for the sake of neighbours
    assert tier.stats()["blocks_kept"] <= tier.stats()["blocks_total"] == 8
    tier.close()


def test_what_is_being_loaded_is_not_evicted_and_what_finds_no_room_is_refused(memory: KVMemory) -> None:
    tier = make(memory, 4)
    kept, other = chain(1, 4), chain(2, 2)
    save(tier, kept)
    assert tier.reserve("a", kept, 0, 4) == 4
    save(tier, other)
    assert (depth(tier, kept), depth(tier, other)) == (4, 0)
    assert tier.stats()["blocks_refused"] == 2
    assert tier.finish("a")
    save(tier, other)
    assert (depth(tier, kept), depth(tier, other)) == (2, 2)
    tier.close()


def test_a_chain_longer_than_the_memory_is_kept_up_to_it(memory: KVMemory) -> None:
    tier = make(memory, 4)
    long = chain(1, 6)
    save(tier, Prefix(ROOT, long.token_ids, long.names[:4]))
    save(tier, long, first=4)
    assert depth(tier, long) == 4
    tier.close()


def test_blocks_whose_parents_are_gone_are_not_kept(memory: KVMemory) -> None:
    tier = make(memory, 4)
    save(tier, chain(1, 4), first=2)
    assert depth(tier, chain(1, 4)) == 0
    assert tier.stats()["blocks_kept"] == 0
    tier.close()


def test_a_long_load_is_copied_a_piece_at_a_time(memory: KVMemory) -> None:
    tier = make(memory, 64)
    long = chain(1, LOAD_BLOCKS + 3)
    save(tier, long)
    blocks = range(LOAD_BLOCKS + 3, 2 * LOAD_BLOCKS + 6)
    assert tier.reserve("a", long, 0, len(blocks)) == len(blocks)
    tier.start_load("a", blocks)
    assert tier.poll() == 0
    assert not tier.wait_layer("a", 1)
    assert tier.errors("a") == frozenset(blocks[LOAD_BLOCKS:])  # what an abort now would leave
    assert tier.poll() is None
    assert tier.wait_layer("a", 1)
    assert tier.errors("a") == frozenset()
    assert tier.finish("a")
    tier.close()


def test_memory_for_no_block_is_refused(memory: KVMemory) -> None:
    with pytest.raises(ConfigError, match=f"tier.host_bytes must hold at least one KV block of {BLOCK_BYTES} bytes"):
        HostTier(memory, TierOptions(host_bytes=BLOCK_BYTES - 1))


def test_what_it_tells_adds_up_to_what_it_keeps(memory: KVMemory) -> None:
    tier = make(memory, 8)
    told: set[bytes] = set()
    for first in range(6):
        prefix = chain(first, 1 + first % 4)
        save(tier, prefix)
        stored, removed = tier.take_events()
        told = (told | {*stored}) - {*removed}
        assert len(told) == tier.stats()["blocks_kept"]
        assert {*prefix.names} <= told
    assert isinstance(tier, Telling)
    assert tier.take_events() == ([], [])
    tier.close()


def test_a_tier_that_fails_is_told_of_as_lost_with_all_it_had(memory: KVMemory) -> None:
    class Failing(HostTier):
        def poll(self) -> float | None:
            raise RuntimeError("no more memory")

    host = Failing(memory, TierOptions(host_bytes=8 * BLOCK_BYTES))
    tiers = Tiers(BlockPool(64), GROUP.num_layers, host, name="host")
    assert tiers.take_events() is None
    prefix = chain(1, 3)
    save(host, prefix)
    assert tiers.take_events() == TierEvents(tier=Tier.HOST, stored=tuple(prefix.names))
    assert tiers.take_events() is None
    save(host, chain(2, 2))
    assert tiers.work()  # so that the step loop reports it, though no step follows
    assert tiers.take_events() == TierEvents(tier=Tier.HOST, is_lost=True)
    assert not tiers.may_load
    host.close()
