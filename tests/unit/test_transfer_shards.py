"""Plans between unequal ranks and block sizes tile: each byte of each target comes once, from the right place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import GeometryMismatch
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer.plan import make_plan, merge_blocks
from kvstore.transfer.shards import ByteRun, Route, Shard, make_shards, routes, split_heads, split_layers

Image = NDArray[np.int64]


def group(**changes: object) -> KVGroup:
    fields: dict[str, object] = {
        "num_layers": 3, "num_kv_heads": 3, "head_dim": 2, "block_size": 4, "dtype": "float16",
    }  # fmt: skip
    return KVGroup(**{**fields, **changes})  # type: ignore[arg-type]


def image(whole: KVGroup, shard: Shard, tokens: range) -> Image:
    """What a rank's memory must hold, found by writing each number of each token to its place; 0 elsewhere."""
    width = whole.head_dim * 2
    memory = np.zeros((shard.num_layers, shard.num_blocks, 2, shard.num_heads, shard.block_size, width), dtype=np.int64)
    for layer, head, token in itertools.product(range(shard.num_layers), range(shard.num_heads), tokens):
        block, slot = shard.block_ids[token // shard.block_size], token % shard.block_size
        for side, byte in itertools.product((0, 1), range(width)):
            where = (shard.first_layer + layer, shard.first_head + head, token, side, byte)
            memory[layer, block, side, head, slot, byte] = 1 + int(np.ravel_multi_index(where, (9, 9, 99, 2, width)))
    return memory.reshape(-1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVGroup, list[Shard], list[Shard], range]:
    whole = group(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.sampled_from([1, 2, 3, 4, 6])),
        head_dim=draw(st.integers(1, 2)),
    )
    stop = draw(st.integers(1, 17))
    tokens = range(draw(st.integers(0, stop - 1)), stop)
    sides = []
    for _ in range(2):
        size = draw(st.integers(1, 6))
        count = -(-stop // size)
        num_blocks = count + draw(st.integers(0, 3))
        ids = draw(st.permutations(range(num_blocks)))[:count]
        ids = sorted(ids) if draw(st.booleans()) else ids
        heads = whole.num_kv_heads
        width = draw(st.sampled_from([w for w in range(1, 13) if heads % w == 0 or w % heads == 0]))
        stages = draw(st.integers(1, whole.num_layers))
        own = group(num_layers=whole.num_layers, num_kv_heads=heads, head_dim=whole.head_dim, block_size=size)
        sides.append(make_shards(own, num_blocks, ids, width=width, stages=stages))
    return whole, sides[0], sides[1], tokens


def all_runs(found: list[Route]) -> list[tuple[int, int, ByteRun]]:
    return [(r.source_rank, r.target_rank, run) for r in found for layer in r.layers for run in r.layer_runs(layer)]


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_each_byte_of_each_target_is_written_once_from_the_right_source(
    case: tuple[KVGroup, list[Shard], list[Shard], range],
) -> None:
    whole, source, target, tokens = case
    sources = {s.rank: image(whole, s, range(tokens.stop)) for s in source}
    expected = {s.rank: image(whole, s, tokens) for s in target}
    got = {rank: np.zeros_like(memory) for rank, memory in expected.items()}
    times = {rank: np.zeros_like(memory) for rank, memory in expected.items()}
    found = routes(whole, source, target, tokens)
    for source_rank, target_rank, run in all_runs(found):
        to = slice(run.target_offset, run.target_offset + run.num_bytes)
        got[target_rank][to] = sources[source_rank][run.source_offset : run.source_offset + run.num_bytes]
        times[target_rank][to] += 1
    for rank, memory in expected.items():
        assert np.array_equal(got[rank], memory)
        assert np.array_equal(times[rank], memory > 0)
    assert sum(r.num_bytes for r in found) == sum(int((memory > 0).sum()) for memory in expected.values())


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_no_two_neighbouring_runs_could_be_one(case: tuple[KVGroup, list[Shard], list[Shard], range]) -> None:
    for route in routes(*case):
        for a, b in itertools.pairwise(route.runs):
            ends = (a.source_offset + a.num_bytes, a.target_offset + a.num_bytes)
            assert (b.source_offset, b.target_offset) != ends


@given(ids=st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True), data=st.data())
def test_between_equal_workers_it_is_the_plan_of_whole_blocks(ids: list[int], data: st.DataObject) -> None:
    target_ids = data.draw(st.permutations(range(12)))[: len(ids)]
    whole, layout = group(), KVGeometry(groups=(group(),), num_blocks=(12,))
    tokens = range(len(ids) * whole.block_size)
    (route,) = routes(whole, make_shards(whole, 12, ids), make_shards(whole, 12, target_ids), tokens)
    plan = make_plan(layout, layout, ids, target_ids)
    for layer in range(whole.num_layers):
        writes = [plan.write(run, "t") for run in merge_blocks(layer, ids, target_ids, 0, len(ids))]
        assert route.layer_runs(layer) == tuple(ByteRun(w.source_offset, w.target_offset, w.num_bytes) for w in writes)


def test_all_widths_of_three_heads_tile_each_other() -> None:
    """The default model has three KV heads: widths 1, 3 and, with each head twice, 6."""
    whole = group()
    for p, d in itertools.product((1, 3, 6), repeat=2):
        source = make_shards(whole, 4, [2, 0], width=p)
        found = routes(whole, source, make_shards(whole, 4, [1, 3], width=d), range(8))
        received = {(r.target_rank, layer) for r in found for layer in r.layers}
        assert received == set(itertools.product(range(d), range(3)))
        each = 8 * 2 * 3 * whole.head_dim * 2 * whole.num_layers  # bytes of the prompt
        assert sum(r.num_bytes for r in found) == each * max(1, d // 3)


def test_of_replicas_one_sends_and_all_of_them_take_turns() -> None:
    whole = group(num_kv_heads=1)
    source, target = make_shards(whole, 2, [0], width=4), make_shards(whole, 2, [1], width=4)
    found = routes(whole, source, target, range(4))
    assert [(r.source_rank, r.target_rank) for r in found] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_head_slice_of_a_block_is_one_run() -> None:
    whole = group()
    found = routes(whole, make_shards(whole, 4, [1]), make_shards(whole, 4, [1], width=3), range(4))
    assert [[r.num_bytes for r in route.runs] for route in found] == [[16, 16]] * 3  # K and V of one head


def test_unequal_blocks_move_in_pieces_of_the_smaller() -> None:
    whole = group(num_kv_heads=1)
    small, large = make_shards(group(block_size=2), 8, range(4)), make_shards(group(block_size=4), 8, [3, 0])
    (route,) = routes(group(), small, large, range(8))
    assert {r.num_bytes for r in route.runs} == {2 * whole.head_dim * 2}
    assert len(route.runs) == 4 * 2 * 3  # pieces, K and V, heads


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(30, 4, [8, 8, 7, 7]), (3, 3, [1, 1, 1]), (5, 1, [5])])
def test_stages_get_layers_as_evenly_as_they_divide(layers: int, stages: int, sizes: list[int]) -> None:
    split = split_layers(layers, stages)
    assert [len(r) for r in split] == sizes
    assert [layer for r in split for layer in r] == list(range(layers))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_heads(3, 2), "3 KV heads cannot be divided among 2"),
        (lambda: split_heads(4, 6), "4 KV heads cannot be divided among 6"),
        (lambda: split_layers(2, 3), "2 layers cannot be split into 3"),
    ],
)
def test_a_division_that_leaves_a_rest_is_refused(call: object, message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0], [0, 1], "source rank 0: 8 tokens need 2 blocks of 4, got 1"),
        ([0, 1], [0, 4], "target rank 0: block ids must be distinct and below 4"),
        ([0, 1], [3, 3], "target rank 0: block ids"),
    ],
)
def test_impossible_block_lists_are_refused(source_ids: list[int], target_ids: list[int], message: str) -> None:
    whole = group()
    with pytest.raises(GeometryMismatch, match=message):
        routes(whole, make_shards(whole, 4, source_ids), make_shards(whole, 4, target_ids), range(8))


def test_a_head_that_no_rank_sends_is_refused() -> None:
    whole = group()
    some = make_shards(whole, 4, [0], width=3)[:2]
    with pytest.raises(GeometryMismatch, match="no source rank holds KV head 2 of layer 0"):
        routes(whole, some, make_shards(whole, 4, [0]), range(4))
