from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, GeometryMismatch
from kvstore.geometry import ITEMSIZE, KVGeometry, KVGroup, check_same_layout
from kvstore.tensors import KVMemory

GROUP = KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="bfloat16")
groups = st.builds(
    KVGroup,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    block_size=st.integers(1, 4),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
)
geometries = st.lists(st.tuples(groups, st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda pairs: KVGeometry(groups=tuple(g for g, _ in pairs), num_blocks=tuple(n for _, n in pairs))
)


@given(geometries)
def test_blocks_tile_the_memory_without_gap_or_overlap(geometry: KVGeometry) -> None:
    pieces = sorted(
        (geometry.offset(i, layer, block), group.block_bytes)
        for i, group in enumerate(geometry.groups)
        for layer in range(group.num_layers)
        for block in range(geometry.num_blocks[i])
    )
    end = 0
    for start, size in pieces:
        assert start == end
        end += size
    assert end == geometry.total_bytes


@given(geometries)
def test_neighbouring_blocks_of_a_layer_are_one_run(geometry: KVGeometry) -> None:
    for i, group in enumerate(geometry.groups):
        for block in range(1, geometry.num_blocks[i]):
            assert geometry.offset(i, 0, block) == geometry.offset(i, 0, block - 1) + group.block_bytes


@given(geometries)
def test_a_geometry_survives_plain_data(geometry: KVGeometry) -> None:
    assert KVGeometry.from_dict(geometry.to_dict()) == geometry
    check_same_layout(geometry, KVGeometry.from_dict(geometry.to_dict()))


def test_bytes_of_a_block_and_a_token() -> None:
    assert GROUP.block_bytes == 2 * 2 * 16 * 4 * 2  # K and V, heads, tokens, head_dim, bytes
    assert GROUP.token_bytes == 3 * 2 * 2 * 4 * 2


def page_bytes(block_size: int, num_kv_heads: int, head_size: int, itemsize: int) -> int:
    """What other engines take for a page of one layer: K and V of each token and head."""
    return sum(itemsize for _ in range(2 * block_size * num_kv_heads * head_size))


def test_a_block_of_the_default_model_is_a_page_of_12288_bytes() -> None:
    group = KVGroup(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    assert group.block_bytes == page_bytes(16, 3, 64, 2) == 12_288
    assert group.token_bytes == 23_040


@settings(max_examples=30, deadline=None)
@given(groups, st.integers(1, 40))
def test_the_capacity_formula_gives_the_bytes_that_are_really_allocated(group: KVGroup, num_blocks: int) -> None:
    memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(num_blocks,)))
    try:
        allocated = os.fstat(memory.fd).st_size
        page = page_bytes(group.block_size, group.num_kv_heads, group.head_dim, ITEMSIZE[group.dtype])
        assert allocated == memory.geometry.total_bytes == len(memory.buffer) == num_blocks * group.num_layers * page
        assert group.blocks_within(allocated) == num_blocks
        assert group.blocks_within(allocated - 1) == num_blocks - 1
    finally:
        memory.close()


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_a_group_without_extent_is_refused_by_its_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kv\.{name} "):
        dataclasses.replace(GROUP, **{name: 0})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^kv\.dtype .*'int4'"):
        dataclasses.replace(GROUP, dtype="int4")


def test_every_group_needs_blocks() -> None:
    with pytest.raises(ConfigError, match=r"^kv\.groups"):
        KVGeometry(groups=(GROUP,), num_blocks=(1, 2))
    with pytest.raises(ConfigError, match=r"^kv\.groups"):
        KVGeometry(groups=(), num_blocks=())
    with pytest.raises(ConfigError, match=r"^kv\.num_blocks"):
        KVGeometry(groups=(GROUP,), num_blocks=(0,))


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 32), ("dtype", "float32"), ("num_layers", 4), ("num_kv_heads", 1), ("head_dim", 8)],
)
def test_unequal_layouts_are_refused_naming_both_values(name: str, value: object) -> None:
    ours = KVGeometry(groups=(GROUP,), num_blocks=(8,))
    theirs = KVGeometry(groups=(dataclasses.replace(GROUP, **{name: value}),), num_blocks=(8,))
    with pytest.raises(GeometryMismatch, match=rf"{name} differs: {getattr(GROUP, name)} here, {value} there"):
        check_same_layout(ours, theirs)


def test_unequal_numbers_of_groups_are_refused() -> None:
    one = KVGeometry(groups=(GROUP,), num_blocks=(8,))
    two = KVGeometry(groups=(GROUP, GROUP), num_blocks=(8, 8))
    with pytest.raises(GeometryMismatch, match="1 here, 2 there"):
        check_same_layout(one, two)


def test_pools_of_unequal_size_exchange_blocks() -> None:
    check_same_layout(KVGeometry(groups=(GROUP,), num_blocks=(8,)), KVGeometry(groups=(GROUP,), num_blocks=(99,)))
