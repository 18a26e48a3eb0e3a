"""One step's tokens packed as a row, with all that attention needs to know, prepared once for all layers.

The row holds decodes first (one token each, grouped by length), then one span for each prefill chunk. Indices address
the memory ``[blocks, 2, kv_heads, block_size, head_dim]`` of a layer as a table of rows: a *token row* is one head of
one token, a *block row* one head of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from services.engine.computation import to_device

if TYPE_CHECKING:
    from services.engine.attention import AttentionBackend

_PAD_FACTOR = 2  # decodes share a call while the longest has at most this many times the blocks of the shortest
_SHORT_BLOCKS = 8  # below that padding costs less than a call


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Views of the KV memory of one group; owns nothing."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    token_rows: tuple[torch.Tensor, ...]  # of each layer: [blocks * 2 * kv_heads * block_size, head_dim]
    block_rows: tuple[torch.Tensor, ...]  # of each layer: [blocks * 2 * kv_heads, block_size * head_dim]

    @classmethod
    def over(cls, layers: Sequence[torch.Tensor]) -> PagedMemory:
        """Args: layers: of each layer [blocks, 2, kv_heads, block_size, head_dim], contiguous."""
        blocks, _, kv_heads, block_size, head_dim = layers[0].shape
        return cls(
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            token_rows=tuple(t.view(blocks * 2 * kv_heads * block_size, head_dim) for t in layers),
            block_rows=tuple(t.view(blocks * 2 * kv_heads, block_size * head_dim) for t in layers),
        )

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Wipe blocks in all layers, so that no NaN of theirs (times a weight of zero) reaches the next owner."""
        for rows in self.block_rows:
            per_block = rows.view(-1, 2 * self.num_kv_heads * self.block_size * self.head_dim)
            per_block[torch.tensor(block_ids, dtype=torch.int64, device=rows.device)] = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the content of blocks, given as (from, to), in all layers. No block may be both."""
        device = self.block_rows[0].device
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
        for rows in self.block_rows:
            per_block = rows.view(-1, 2 * self.num_kv_heads * self.block_size * self.head_dim)
            per_block.index_copy_(0, targets, per_block.index_select(0, sources))


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence to be computed: positions start .. start + len(token_ids) - 1."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]  # the sequence's table, at least up to the last of these tokens


@dataclass(slots=True)
class DecodeGroup:
    """Single tokens of sequences with similar length, at start..stop of the packed row."""

    start: int
    stop: int
    lengths: torch.Tensor  # [n] tokens each one sees, itself included
    read_rows: torch.Tensor  # [2 * n * kv_heads * blocks] block rows: keys, then values
    scratch: torch.Tensor  # [2 * n * kv_heads * blocks, block_size * head_dim], overwritten by each layer
    padded: int  # tokens each gathered sequence has
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> torch.Tensor:
        """[n, 1, 1, padded]: 0 for what the token sees, -inf elsewhere."""
        if window not in self.masks:
            at = torch.arange(self.padded, device=self.lengths.device)
            last = self.lengths[:, None]
            hidden = at >= last
            if window:
                hidden |= at < last - window
            mask = torch.zeros(hidden.shape, dtype=self.scratch.dtype, device=hidden.device)
            self.masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[window]


@dataclass(slots=True)
class PrefillSpan:
    """A chunk of one sequence, at start..stop of the packed row, after ``context`` tokens computed before."""

    start: int
    stop: int
    context: int
    read_rows: torch.Tensor  # [2 * kv_heads * blocks]
    scratch: torch.Tensor  # [2 * kv_heads * blocks, block_size * head_dim]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the last one of the chunk sees, itself included."""
        return self.context + self.stop - self.start

    def mask(self, window: int) -> torch.Tensor | None:
        """[tokens, length], 0 or -inf; None where plain causal masking says the same."""
        if not self.context and (not window or window >= self.length):
            return None
        if window not in self.masks:
            seen = torch.arange(self.length, device=self.read_rows.device)
            own = torch.arange(self.context, self.length, device=self.read_rows.device)[:, None]
            hidden = seen > own
            if window:
                hidden |= seen <= own - window
            mask = torch.zeros(hidden.shape, dtype=self.scratch.dtype, device=hidden.device)
            self.masks[window] = mask.masked_fill_(hidden, float("-inf"))
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A step, ready for the model."""

    memory: PagedMemory
    backend: AttentionBackend
    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    key_rows: torch.Tensor  # [T * kv_heads] token rows that K goes to
    value_rows: torch.Tensor  # [T * kv_heads]
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]
    ends: tuple[int, ...]  # for each span, in the caller's order: where its last token lies in the row
    starts: tuple[int, ...]  # and its first
    spans: tuple[Span, ...]  # in the caller's order
    on_layer: Callable[[int], None] | None = None
    asked: dict[int, tuple[float, int]] = field(default_factory=dict)  # of each layer: scaling, window


def pack(
    memory: PagedMemory, backend: AttentionBackend, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None
) -> PackedBatch:
    """Lay the spans of a step in one row. ``on_layer`` is called when K and V of a layer are in the memory."""
    singles = [i for i, span in enumerate(spans) if len(span.token_ids) == 1]
    singles.sort(key=lambda i: spans[i].start)
    chunks = [i for i, span in enumerate(spans) if len(span.token_ids) != 1]
    order = singles + chunks
    ids = [t for i in order for t in spans[i].token_ids]
    positions = np.concatenate([np.arange(spans[i].start, spans[i].start + len(spans[i].token_ids)) for i in order])
    starts, ends, at = [0] * len(spans), [0] * len(spans), 0
    for i in order:
        starts[i], ends[i] = at, at + len(spans[i].token_ids) - 1
        at = ends[i] + 1
    device = memory.token_rows[0].device
    keys, values = _write_rows(memory, [spans[i] for i in order], positions, device)
    return PackedBatch(
        memory=memory,
        backend=backend,
        input_ids=to_device(torch.tensor(ids, dtype=torch.int64), device).unsqueeze(0),
        positions=to_device(torch.from_numpy(positions), device).unsqueeze(0),
        key_rows=keys,
        value_rows=values,
        decodes=_decode_groups(memory, [spans[i] for i in singles]) if backend.gathers else (),
        prefills=tuple(_prefill_span(memory, spans[i], starts[i]) for i in chunks) if backend.gathers else (),
        ends=tuple(ends),
        starts=tuple(starts),
        spans=tuple(spans),
        on_layer=on_layer,
    )


def _write_rows(
    memory: PagedMemory, spans: Sequence[Span], positions: npt.NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    size, heads = memory.block_size, memory.num_kv_heads
    blocks = np.concatenate(
        [np.asarray(s.block_ids[s.start // size : (s.start + len(s.token_ids) - 1) // size + 1]) for s in spans]
    )
    # index into `blocks` of each token: first block of its span, then one more at each block's edge
    counts = [(s.start + len(s.token_ids) - 1) // size - s.start // size + 1 for s in spans]
    firsts = np.repeat(np.cumsum([0, *counts[:-1]]), [len(s.token_ids) for s in spans])
    offsets = np.repeat([s.start // size for s in spans], [len(s.token_ids) for s in spans])
    slots = blocks[firsts + positions // size - offsets]
    base = (slots * 2 * heads * size + positions % size)[:, None] + np.arange(heads) * size
    keys = to_device(torch.from_numpy(np.ascontiguousarray(base.reshape(-1))), device)
    return keys, keys + heads * size


def _block_rows(memory: PagedMemory, tables: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows that gather [2, n, kv_heads, blocks] from tables [n, blocks]."""
    heads = memory.num_kv_heads
    keys = tables[:, None, :] * (2 * heads) + np.arange(heads)[None, :, None]
    return torch.from_numpy(np.stack([keys, keys + heads]).reshape(-1))


def _scratch(memory: PagedMemory, rows: torch.Tensor) -> torch.Tensor:
    source = memory.block_rows[0]
    return torch.empty(rows.shape[0], source.shape[1], dtype=source.dtype, device=source.device)


def _decode_groups(memory: PagedMemory, spans: Sequence[Span]) -> tuple[DecodeGroup, ...]:
    """Args: spans: single tokens by rising position; they lie at the head of the row in this order."""
    groups, start = [], 0
    while start < len(spans):
        shortest = spans[start].start // memory.block_size + 1
        limit = max(_SHORT_BLOCKS, shortest * _PAD_FACTOR)
        stop = start
        while stop < len(spans) and spans[stop].start // memory.block_size + 1 <= limit:
            stop += 1
        members = spans[start:stop]
        width = members[-1].start // memory.block_size + 1
        tables = np.zeros((len(members), width), dtype=np.int64)
        for i, span in enumerate(members):
            own = span.block_ids[: span.start // memory.block_size + 1]
            tables[i, : len(own)] = own
            tables[i, len(own) :] = own[-1]  # padding repeats a block of its own, so nothing foreign is ever gathered
        rows = to_device(_block_rows(memory, tables), memory.block_rows[0].device)
        lengths = to_device(torch.tensor([s.start + 1 for s in members], dtype=torch.int64), rows.device)
        padded = width * memory.block_size
        groups.append(DecodeGroup(start, stop, lengths, rows, _scratch(memory, rows), padded))
        start = stop
    return tuple(groups)


def _prefill_span(memory: PagedMemory, span: Span, at: int) -> PrefillSpan:
    length = span.start + len(span.token_ids)
    table = np.asarray(span.block_ids[: -(-length // memory.block_size)], dtype=np.int64)
    rows = to_device(_block_rows(memory, table[None]), memory.block_rows[0].device)
    return PrefillSpan(at, at + len(span.token_ids), span.start, rows, _scratch(memory, rows))
