"""The native attention kernel against torch's scaled dot product attention over gathered keys, in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from services.engine.attention import Heads, ReferenceBackend
from services.engine.batch import PagedMemory, Span, pack
from services.engine.native.attention import NativeBackend
from tests.native_models import RUNNABLE, kernels

NUM_BLOCKS = 40


def oracle(memory: PagedMemory, span: Span, query: torch.Tensor, scaling: float, window: int) -> torch.Tensor:
    """[tokens, heads, head_dim] in float64, one token at a time."""
    layer = memory.block_rows[0].view(NUM_BLOCKS, 2, memory.num_kv_heads, memory.block_size, memory.head_dim)
    outs = []
    for i in range(len(span.token_ids)):
        stop = span.start + i + 1
        first = max(0, stop - window) if window else 0
        at = range(first, stop)
        rows = [layer[span.block_ids[p // memory.block_size], :, :, p % memory.block_size].double() for p in at]
        keys, values = torch.stack(rows, dim=2)  # [kv_heads, seen, head_dim] each
        group = query.shape[1] // memory.num_kv_heads
        q = query[i].double().view(memory.num_kv_heads, group, memory.head_dim)
        outs.append(F.scaled_dot_product_attention(q, keys, values, scale=scaling).reshape(-1, memory.head_dim))
    return torch.stack(outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "block_size", "window"),
    [(64, 3, 3, 16, 0), (32, 1, 1, 4, 0), (128, 2, 4, 16, 50), (96, 1, 7, 24, 0), (256, 1, 2, 32, 130)],
)
def test_attention_over_blocks_is_attention(
    head_dim: int, kv_heads: int, group: int, block_size: int, window: int, kind: str, dtype: torch.dtype
) -> None:
    backend, rng = NativeBackend(kernels(kind)), random.Random(head_dim)
    torch.manual_seed(head_dim)
    layer = torch.full((NUM_BLOCKS, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    memory = PagedMemory.over([layer])
    free, spans = list(range(NUM_BLOCKS)), []
    rng.shuffle(free)
    for start, count in ((0, 1), (149, 1), (0, 130), (70, 75), (0, 16)):
        blocks = [free.pop() for _ in range(-(-(start + count) // block_size))] if block_size >= 16 else []
        if not blocks:  # small blocks: short sequences only
            start, count = start % 9, min(count, 20)
            blocks = [free.pop() for _ in range(-(-(start + count) // block_size))]
        for position in range(start):
            layer[blocks[position // block_size], :, :, position % block_size] = torch.randn(2, kv_heads, head_dim).to(
                dtype
            )
        spans.append(Span([7] * count, start, blocks))
    total = sum(len(span.token_ids) for span in spans)
    heads = Heads(
        query=torch.randn(total, kv_heads * group, head_dim).to(dtype),
        key=torch.randn(total, kv_heads, head_dim).to(dtype),
        value=torch.randn(total, kv_heads, head_dim).to(dtype),
        scaling=0.11,
        window=window,
    )
    batch = pack(memory, backend, spans)
    backend.write(batch, 0, heads)
    got = backend.read(batch, 0, heads)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for span, start in zip(spans, batch.starts, strict=True):
        query = heads.query[start : start + len(span.token_ids)]
        expected = oracle(memory, span, query, 0.11, window)
        error = (got[start : start + len(span.token_ids)].double() - expected).abs().max()
        assert float(error) < limit, f"span at {span.start} of {len(span.token_ids)}"


def test_the_reference_gathers_and_the_kernels_do_not() -> None:
    backend = NativeBackend(kernels("auto"))
    memory = PagedMemory.over([torch.zeros(NUM_BLOCKS, 2, 1, 16, 32)])
    spans = [Span([1], 600, list(range(38)))]
    assert pack(memory, backend, spans).decodes == ()
    assert pack(memory, ReferenceBackend(), spans).decodes[0].scratch.numel() >= 2 * 600 * 32


def test_its_workspace_is_bounded_by_the_shape_of_a_head() -> None:
    library = kernels("auto")
    for item_bytes, kv_heads, group, head_dim in ((2, 3, 3, 64), (4, 8, 4, 128)):
        held = library.attention_bytes(item_bytes, kv_heads, group, head_dim, 16)
        tile = 64 * head_dim * item_bytes * 2  # K and V of one step
        rows = 64 * group * head_dim * (item_bytes + 4)  # queries and sums of one item
        assert held < 2 * (tile + rows) + 65536
