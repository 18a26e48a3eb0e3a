"""Paged attention by the native kernels, for models that the fused path does not take."""

from __future__ import annotations

import numpy as np
import torch

from services.engine.attention import Heads, ReferenceBackend
from services.engine.batch import PackedBatch
from services.engine.native.library import MAX_HEAD_DIM, PANEL, Kernels

DTYPES = ("bfloat16", "float32")


def why_not(head_dim: int, dtype: str) -> str:
    """What keeps the kernels from computing such heads; empty where nothing does."""
    if head_dim % PANEL:
        return f"head_dim {head_dim} is no multiple of {PANEL}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    return "" if dtype in DTYPES else f"KV of {dtype} is not among {', '.join(DTYPES)}"


class NativeBackend(ReferenceBackend):
    """Writes like the reference; reads by an online softmax over the blocks, in place.

    Its memory is a workspace for each thread, which does not grow with contexts or batches.
    """

    name = "native"
    gathers = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def read(self, batch: PackedBatch, layer: int, heads: Heads) -> torch.Tensor:
        memory = batch.memory
        query = heads.query.contiguous()
        out = torch.empty_like(query)
        spans = [(start, len(s.token_ids), s.start) for s, start in zip(batch.spans, batch.starts, strict=True)]
        shape = np.array(spans, dtype=np.int32)
        tables = [np.asarray(span.block_ids, dtype=np.int32) for span in batch.spans]
        addresses = np.array([table.ctypes.data for table in tables], dtype=np.uint64)
        self._kernels.attend(
            query.itemsize,
            memory.token_rows[layer].data_ptr(),
            memory.num_kv_heads,
            query.shape[1] // memory.num_kv_heads,
            memory.head_dim,
            memory.block_size,
            heads.scaling,
            heads.window,
            len(spans),
            shape.ctypes.data,
            addresses.ctypes.data,
            query.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
