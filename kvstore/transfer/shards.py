"""Which bytes go where between two workers whose ranks or block sizes differ.

A worker's KV of one prompt lies in shards: each rank has some layers (pipeline stages) and some KV heads (tensor
parallelism) in a memory of its own, laid out ``[layers, blocks, 2, kv_heads, block_size, head_dim]``. With more ranks
than heads each head lies on several of them. The plan tiles: each byte of each target shard is written once, from one
of the shards that hold it.

    routes(source shards, target shards, tokens) ─► Route for each pair of ranks that has something to send
                                                       └─ layer_runs(layer) ─► byte runs, neighbours merged

A layer's runs are the same for all layers but for an offset, so they are planned once. Between equal block sizes and
all heads a run is a row of blocks; between unequal ones it is a head's tokens that lie in one block on both sides.

Pure. Sessions do not use it yet: their tickets and digests name whole blocks of one memory (`kvstore.transfer.plan`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.errors import GeometryMismatch
from kvstore.geometry import ITEMSIZE, KVGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of one prompt's KV. Layers and heads count in the whole model."""

    rank: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    block_size: int  # tokens
    num_blocks: int  # of the rank's memory
    block_ids: tuple[int, ...]  # of the prompt, in that memory

    def holds(self, layer: int, head: int) -> bool:
        layers, heads = range(self.num_layers), range(self.num_heads)
        return layer - self.first_layer in layers and head - self.first_head in heads


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Contiguous in both memories; offsets in bytes."""

    source_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What one source rank sends to one target rank."""

    source_rank: int
    target_rank: int
    layers: range  # of the whole model
    runs: tuple[ByteRun, ...]  # of the first of these layers
    source_stride: int  # bytes from one layer to the next
    target_stride: int

    def layer_runs(self, layer: int) -> tuple[ByteRun, ...]:
        """Runs of one layer. Raises ValueError for a layer that this route does not carry."""
        step = self.layers.index(layer)
        source, target = step * self.source_stride, step * self.target_stride
        return tuple(ByteRun(r.source_offset + source, r.target_offset + target, r.num_bytes) for r in self.runs)

    @property
    def num_bytes(self) -> int:
        return len(self.layers) * sum(r.num_bytes for r in self.runs)


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of each pipeline stage; the first ones get one more where they do not divide evenly."""
    if not 1 <= stages <= num_layers:
        raise GeometryMismatch(f"{num_layers} layers cannot be split into {stages} pipeline stages")
    size, more = divmod(num_layers, stages)
    starts = [i * size + min(i, more) for i in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def split_heads(num_heads: int, width: int) -> list[range]:
    """KV heads of each tensor-parallel rank; more ranks than heads share them, neighbours the same one."""
    if width < 1 or (num_heads % width and width % num_heads):
        raise GeometryMismatch(f"{num_heads} KV heads cannot be divided among {width} tensor-parallel ranks")
    if width <= num_heads:
        each = num_heads // width
        return [range(i * each, (i + 1) * each) for i in range(width)]
    return [range(i * num_heads // width, i * num_heads // width + 1) for i in range(width)]


def make_shards(
    group: KVGroup, num_blocks: int, block_ids: Sequence[int], *, width: int = 1, stages: int = 1
) -> list[Shard]:
    """Shards of a worker that gives a prompt the same block ids on each rank; rank = stage × width + position.

    Args:
        group: of the whole model, with the worker's own block size.
        width: tensor-parallel ranks of each stage.
    """
    return [
        Shard(
            rank=stage * width + position,
            first_layer=layers.start,
            num_layers=len(layers),
            first_head=heads.start,
            num_heads=len(heads),
            block_size=group.block_size,
            num_blocks=num_blocks,
            block_ids=tuple(block_ids),
        )
        for stage, layers in enumerate(split_layers(group.num_layers, stages))
        for position, heads in enumerate(split_heads(group.num_kv_heads, width))
    ]


def routes(group: KVGroup, source: Sequence[Shard], target: Sequence[Shard], tokens: range) -> list[Route]:
    """All that must be sent so that each target shard holds its layers and heads of ``tokens``.

    Where several source ranks hold a head, one of them sends it; which one turns with the target's rank.

    Args:
        group: of the whole model; its block size is not looked at.
        tokens: positions in the prompt, step 1; what comes before them is there already.

    Raises:
        GeometryMismatch: a block list that is too short or impossible, or layers or heads that no source holds.
    """
    if tokens.step != 1 or tokens.start < 0:
        raise ValueError(f"tokens must be a range of positions, got {tokens}")
    for name, shards in (("source", source), ("target", target)):
        for shard in shards:
            _check(name, shard, tokens)
    token_bytes = group.head_dim * ITEMSIZE[group.dtype]
    found: list[Route] = []
    for reader in target:
        for layers, heads, writer in _senders(source, reader):
            spans = list(_spans(writer, reader, tokens))
            runs = _merge(_pieces(writer, reader, layers.start, heads, spans, token_bytes))
            found.append(
                Route(
                    source_rank=writer.rank,
                    target_rank=reader.rank,
                    layers=layers,
                    runs=tuple(runs),
                    source_stride=_layer_bytes(writer, token_bytes),
                    target_stride=_layer_bytes(reader, token_bytes),
                )
            )
    return found


def _check(name: str, shard: Shard, tokens: range) -> None:
    ids, needed = shard.block_ids, -(-tokens.stop // shard.block_size)
    who = f"{name} rank {shard.rank}"
    if len(ids) < needed:
        raise GeometryMismatch(
            f"{who}: {tokens.stop} tokens need {needed} blocks of {shard.block_size}, got {len(ids)}"
        )
    if len(set(ids)) != len(ids) or (ids and not 0 <= min(ids) <= max(ids) < shard.num_blocks):
        raise GeometryMismatch(f"{who}: block ids must be distinct and below {shard.num_blocks}")


def _senders(source: Sequence[Shard], reader: Shard) -> Iterator[tuple[range, range, Shard]]:
    """(layers, heads, writer): a tiling of what the reader holds into parts that one writer has."""
    layer = reader.first_layer
    while layer < reader.first_layer + reader.num_layers:
        head, stop = reader.first_head, reader.first_layer + reader.num_layers
        parts: list[tuple[range, Shard]] = []
        while head < reader.first_head + reader.num_heads:
            holders = sorted((s for s in source if s.holds(layer, head)), key=lambda s: s.rank)
            if not holders:
                raise GeometryMismatch(f"no source rank holds KV head {head} of layer {layer}")
            writer = holders[reader.rank % len(holders)]
            end = min(reader.first_head + reader.num_heads, writer.first_head + writer.num_heads)
            parts.append((range(head, end), writer))
            stop = min(stop, writer.first_layer + writer.num_layers)
            head = end
        for heads, writer in parts:
            yield range(layer, stop), heads, writer
        layer = stop


def _spans(writer: Shard, reader: Shard, tokens: range) -> Iterator[tuple[int, int]]:
    """(first token, count): pieces that lie in one block on both sides."""
    at = tokens.start
    while at < tokens.stop:
        ends = [(at // size + 1) * size for size in (writer.block_size, reader.block_size)]
        end = min(tokens.stop, *ends)
        yield at, end - at
        at = end


def _pieces(
    writer: Shard, reader: Shard, layer: int, heads: range, spans: Sequence[tuple[int, int]], token_bytes: int
) -> Iterator[ByteRun]:
    """One layer, in the order in which neighbours of equal layouts follow each other."""
    for token, count in spans:
        for side in (0, 1):
            for head in heads:
                yield ByteRun(
                    _offset(writer, layer, side, head, token, token_bytes),
                    _offset(reader, layer, side, head, token, token_bytes),
                    count * token_bytes,
                )


def _offset(shard: Shard, layer: int, side: int, head: int, token: int, token_bytes: int) -> int:
    block, slot = shard.block_ids[token // shard.block_size], token % shard.block_size
    rows = ((layer - shard.first_layer) * shard.num_blocks + block) * 2 + side
    return ((rows * shard.num_heads + head - shard.first_head) * shard.block_size + slot) * token_bytes


def _layer_bytes(shard: Shard, token_bytes: int) -> int:
    return shard.num_blocks * 2 * shard.num_heads * shard.block_size * token_bytes


def _merge(pieces: Iterator[ByteRun]) -> list[ByteRun]:
    """Join each piece to the one before where it continues it on both sides."""
    runs: list[ByteRun] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        ends = (last.source_offset + last.num_bytes, last.target_offset + last.num_bytes) if last else None
        if last and (piece.source_offset, piece.target_offset) == ends:
            runs[-1] = ByteRun(last.source_offset, last.target_offset, last.num_bytes + piece.num_bytes)
        else:
            runs.append(piece)
    return runs
