"""Merged runs copy exactly what copying block after block copies."""

from __future__ import annotations

import itertools

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import GeometryMismatch
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer.digest import extent_span, find_bad
from kvstore.transfer.messages import Extent
from kvstore.transfer.plan import Run, make_plan, merge_blocks

NUM_LAYERS = 3


def geometry(num_blocks: int, **changes: object) -> KVGeometry:
    fields: dict[str, object] = {
        "num_layers": NUM_LAYERS, "num_kv_heads": 1, "head_dim": 1, "block_size": 2, "dtype": "float16",
    }  # fmt: skip
    return KVGeometry(groups=(KVGroup(**{**fields, **changes}),), num_blocks=(num_blocks,))  # type: ignore[arg-type]


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Source and target ids that often lie side by side, and a window into them."""
    count = draw(st.integers(1, 20))
    source = draw(st.permutations(range(24)))[:count]
    target = draw(st.permutations(range(30)))[:count]
    if draw(st.booleans()):
        source, target = sorted(source), sorted(target)
    first = draw(st.integers(0, count))
    return source, target, first, draw(st.integers(0, count - first))


@given(lists=block_lists(), layer=st.integers(0, NUM_LAYERS - 1))
def test_runs_copy_what_single_blocks_copy(lists: tuple[list[int], list[int], int, int], layer: int) -> None:
    source_ids, target_ids, first, count = lists
    plan = make_plan(geometry(24), geometry(30), source_ids, target_ids)
    block_bytes = plan.source.groups[0].block_bytes
    memory = bytes(i % 251 for i in range(plan.source.total_bytes))
    merged, single = bytearray(plan.target.total_bytes), bytearray(plan.target.total_bytes)
    runs = merge_blocks(layer, source_ids, target_ids, first, count)
    for run in runs:
        write = plan.write(run, "t")
        piece = memory[write.source_offset : write.source_offset + write.num_bytes]
        merged[write.target_offset : write.target_offset + write.num_bytes] = piece
    for source, target in list(zip(source_ids, target_ids, strict=True))[first : first + count]:
        at, to = plan.source.offset(0, layer, source), plan.target.offset(0, layer, target)
        single[to : to + block_bytes] = memory[at : at + block_bytes]
    assert merged == single
    assert sum(run.count for run in runs) == count


@given(lists=block_lists())
def test_no_two_neighbouring_runs_could_be_one(lists: tuple[list[int], list[int], int, int]) -> None:
    runs = merge_blocks(0, *lists)
    for a, b in itertools.pairwise(runs):
        touches = (b.source_block, b.target_block) == (a.source_block + a.count, a.target_block + a.count)
        assert not touches


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert merge_blocks(1, [5, 6, 7, 1], [2, 3, 4, 5], 0, 4) == [Run(1, 5, 2, 3), Run(1, 1, 5, 1)]


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 1], [0], "2 blocks, the grant names 1"),
        ([0, 24], [0, 1], "source block ids reach 24, the memory has 24"),
        ([0, 1], [0, -1], "target block ids"),
        ([0, 1], [3, 3], "name a block twice"),
    ],
)
def test_impossible_block_lists_are_refused(source_ids: list[int], target_ids: list[int], message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        make_plan(geometry(24), geometry(30), source_ids, target_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"block_size": 4}, "block_size differs: 2 here, 4 there"), ({"dtype": "float32"}, "float16 here, float32 there")],
)
def test_unequal_layouts_are_refused_and_both_values_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        make_plan(geometry(24), geometry(30, **change), [0], [0])


def test_more_than_one_kv_group_is_refused() -> None:
    group = geometry(4).groups[0]
    two = KVGeometry(groups=(group, group), num_blocks=(4, 4))
    with pytest.raises(GeometryMismatch, match="this model has 2"):
        make_plan(two, two, [0], [0])


@given(at=st.integers(0, 30 * 8 * NUM_LAYERS - 1))
def test_a_changed_byte_spoils_just_the_extent_that_holds_it(at: int) -> None:
    layout = geometry(30)
    memory = bytearray(i % 253 for i in range(layout.total_bytes))
    extents = []
    for layer in range(NUM_LAYERS):
        for block, count in ((0, 7), (7, 1), (8, 22)):
            span = extent_span(layout, Extent(layer=layer, block=block, count=count))
            assert span is not None
            digest = xxhash.xxh3_64_intdigest(bytes(memory[span[0] : span[0] + span[1]]))
            extents.append(Extent(layer=layer, block=block, count=count, digest=digest))
    assert find_bad(memoryview(memory), layout, extents) == ()
    memory[at] ^= 0x40
    (bad,) = find_bad(memoryview(memory), layout, extents)
    span = extent_span(layout, bad)
    assert span is not None
    assert span[0] <= at < span[0] + span[1]


@pytest.mark.parametrize(
    "extent",
    [
        Extent(layer=NUM_LAYERS, block=0, count=1),
        Extent(layer=-1, block=0, count=1),
        Extent(layer=0, block=29, count=2),
        Extent(layer=0, block=-1, count=1),
        Extent(layer=0, block=0, count=0),
    ],
)
def test_an_extent_that_the_memory_does_not_have_is_bad(extent: Extent) -> None:
    layout = geometry(30)
    assert extent_span(layout, extent) is None
    assert find_bad(memoryview(bytearray(layout.total_bytes)), layout, [extent]) == (extent,)
