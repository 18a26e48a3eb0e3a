from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.geometry import KVGeometry, KVGroup
from kvstore.tensors import KVMemory

GEOMETRY = KVGeometry(
    groups=(
        KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, block_size=5, dtype="bfloat16"),
        KVGroup(num_layers=2, num_kv_heads=1, head_dim=3, block_size=4, dtype="float32"),
    ),
    num_blocks=(6, 4),
)
REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    memory = KVMemory.create(GEOMETRY)
    yield memory
    memory.close()
    gc.collect()


def test_views_and_offsets_agree_byte_for_byte(memory: KVMemory) -> None:
    random_bytes = random.Random(5).randbytes(memory.num_bytes)
    memory.buffer[:] = random_bytes
    for i, group in enumerate(GEOMETRY.groups):
        for layer in range(group.num_layers):
            view = memory.layer(i, layer)
            shape = (GEOMETRY.num_blocks[i], 2, group.num_kv_heads, group.block_size, group.head_dim)
            assert view.shape == shape
            assert view.is_contiguous()
            assert view.dtype == getattr(torch, group.dtype)
            for block in range(GEOMETRY.num_blocks[i]):
                start = GEOMETRY.offset(i, layer, block)
                expected = random_bytes[start : start + group.block_bytes]
                assert view[block].contiguous().view(torch.uint8).numpy().tobytes() == expected
                assert bytes(memory.block(i, layer, block)) == expected
                assert view[block].data_ptr() == memory.address + start


def test_what_a_view_writes_lies_in_the_memory(memory: KVMemory) -> None:
    memory.layer(0, 2)[4, 1, 1, 3] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    piece = memory.block(0, 2, 4)
    values = torch.frombuffer(piece, dtype=torch.bfloat16).view(2, 2, 5, 4)
    assert values[1, 1, 3].tolist() == [1.0, -2.0, 0.5, 3.0]
    assert memory.buffer.nbytes - bytes(memory.buffer).count(0) <= 8  # nothing else was touched


def test_two_processes_see_each_others_writes(memory: KVMemory) -> None:
    """The other process maps the descriptor without torch, as the transfer process does."""
    memory.layer(0, 1)[2].fill_(1.5)
    code = f"""
import sys
from kvstore.geometry import KVGeometry
from kvstore.tensors import KVMemory
memory = KVMemory.attach({memory.fd}, KVGeometry.from_dict({GEOMETRY.to_dict()!r}))
assert bytes(memory.block(0, 1, 2)) == bytes.fromhex("c03f") * 80, "the parent's write is not here"
memory.block(1, 0, 3)[:] = b"\\x00\\x00\\x80\\x3f" * 24
memory.close()
assert "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[memory.fd],
        env={**os.environ, "PYTHONPATH": REPOSITORY},
        check=True,
        timeout=60,
    )
    assert memory.layer(1, 0)[3].eq(1.0).all()


def test_memory_grows_on_touch_only() -> None:
    group = KVGroup(num_layers=4, num_kv_heads=8, head_dim=64, block_size=16, dtype="float32")
    memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(4096,)))
    try:
        assert memory.num_bytes == 1 << 30
        assert os.fstat(memory.fd).st_blocks == 0
        memory.block(0, 2, 1000)[:] = b"\x01" * group.block_bytes
        assert os.fstat(memory.fd).st_blocks * 512 <= group.block_bytes + 2 * 4096
    finally:
        memory.close()


def test_new_memory_is_zero(memory: KVMemory) -> None:
    assert not any(memory.buffer)


def test_a_block_is_copied_in_all_its_layers_and_nowhere_else(memory: KVMemory) -> None:
    memory.buffer[:] = random.Random(7).randbytes(memory.num_bytes)
    expected = bytearray(memory.buffer)
    for layer in range(3):
        source, target, size = (
            GEOMETRY.offset(0, layer, 1),
            GEOMETRY.offset(0, layer, 5),
            GEOMETRY.groups[0].block_bytes,
        )
        expected[target : target + size] = expected[source : source + size]
    memory.copy_block(0, 1, 5)
    assert bytes(memory.buffer) == bytes(expected)


def test_a_descriptor_of_another_size_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, GEOMETRY.total_bytes + 1)
    with pytest.raises(
        ValueError, match=f"{GEOMETRY.total_bytes + 1} bytes, its geometry needs {GEOMETRY.total_bytes}"
    ):
        KVMemory.attach(fd, GEOMETRY)
    os.close(fd)  # still the caller's


def test_layers_and_blocks_outside_are_refused(memory: KVMemory) -> None:
    with pytest.raises(IndexError):
        memory.layer(0, 3)
    with pytest.raises(IndexError):
        memory.block(0, 0, 6)
    with pytest.raises(IndexError):
        memory.block(0, 3, 0)
    for source, target in ((0, 6), (6, 0), (0, -1)):
        with pytest.raises(IndexError):
            memory.copy_block(0, source, target)


def test_closing_twice_is_once_and_a_view_outlives_it() -> None:
    memory = KVMemory.create(GEOMETRY)
    view, fd = memory.layer(0, 0), memory.fd
    view.fill_(2.0)
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view.eq(2.0).all()
    with pytest.raises(ValueError, match="closed"):
        memory.layer(0, 0)
