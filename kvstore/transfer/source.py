"""What the engine has computed: progress messages become pieces, newly final blocks of one layer of one prompt.

    StepBegins(chunks) ─► LayersDone(0, …) ─► … ─► LayersDone(…, n-1) ─► StepEnds      each arrow yields pieces, each
    block of a layer once

Progress comes on a socket of its own, so it may name a prompt whose OpenSource is still in the pipe: such pieces
wait, bounded in number and age. A LayersDone that got lost is made up for by StepEnds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.transfer.messages import OpenSource
from kvstore.transfer.progress import Chunk, Progress, StepBegins, StepEnds

READY_STEP = -1  # step of blocks that were computed before the request
MAX_EARLY_PROMPTS = 1024
MAX_EARLY_S = 60.0
MAX_OPEN_STEPS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks ``first`` to ``first + count`` of a prompt hold their final KV in one layer."""

    layer: int
    first: int
    count: int
    step: int
    computed_s: float


class Source:
    """The blocks of one prompt on the writer, and the pieces of it that are computed."""

    def __init__(self, message: OpenSource, num_layers: int, now_s: float) -> None:
        self.seq_id = message.seq_id
        self.block_ids = message.block_ids
        self.num_layers = num_layers
        self.pieces: list[Piece] = []
        self._covered = [bytearray(len(message.block_ids)) for _ in range(num_layers)]
        if message.ready_blocks:
            for layer in range(num_layers):
                self.add(Piece(layer, 0, message.ready_blocks, READY_STEP, now_s))

    def add(self, piece: Piece) -> list[Piece]:
        """Record a piece; returns the parts of it that are new, what lies outside the prompt cut off."""
        covered = self._covered[piece.layer]
        stop = min(piece.first + piece.count, len(covered))
        if all(covered[piece.first : stop]):
            return []
        new: list[Piece] = []
        start = None
        for index in range(piece.first, stop + 1):
            fresh = index < stop and not covered[index]
            if fresh:
                covered[index] = 1
                start = index if start is None else start
            elif start is not None:
                new.append(Piece(piece.layer, start, index - start, piece.step, piece.computed_s))
                start = None
        self.pieces += new
        return new

    def computed_so_far(self) -> list[Piece]:
        """All pieces with neighbours of a layer merged, layer by layer; a merged piece has the newest step."""
        merged: list[Piece] = []
        for piece in sorted(self.pieces, key=lambda p: (p.layer, p.first)):
            last = merged[-1] if merged else None
            if last and last.layer == piece.layer and last.first + last.count == piece.first:
                newest = max(last, piece, key=lambda p: p.step)
                merged[-1] = Piece(piece.layer, last.first, last.count + piece.count, newest.step, newest.computed_s)
            else:
                merged.append(piece)
        return merged


class ProgressTable:
    """Turns the engine's progress into pieces of prompts, known ones or ones whose OpenSource is still to come.

    A layer may be named twice, by itself and by the end of its step; `Source.add` takes it once.
    """

    def __init__(self, num_layers: int, layerwise: bool) -> None:
        self._num_layers = num_layers
        self._layerwise = layerwise
        self._steps: OrderedDict[int, tuple[Chunk, ...]] = OrderedDict()
        self._early: OrderedDict[str, tuple[float, list[Piece]]] = OrderedDict()

    def on_progress(self, message: Progress) -> list[tuple[str, Piece]]:
        """(seq_id, piece) of all that this message says is computed, layer by layer."""
        if isinstance(message, StepBegins):
            self._steps[message.step] = message.chunks
            while len(self._steps) > MAX_OPEN_STEPS:
                self._steps.popitem(last=False)
            return []
        chunks = self._steps.get(message.step, ())
        done: Iterable[tuple[int, float]] = ()  # (layer, computed at)
        if isinstance(message, StepEnds):
            self._steps.pop(message.step, None)
            done = ((layer, message.at_s) for layer in range(self._num_layers))
        elif self._layerwise:
            done = ((layer, s) for layer, s in enumerate(message.at_s, message.first) if 0 <= layer < self._num_layers)
        return [
            (chunk.seq_id, Piece(layer, chunk.first, chunk.count, message.step, at_s))
            for layer, at_s in done
            for chunk in chunks
            if chunk.count > 0 and chunk.first >= 0
        ]

    def keep_early(self, seq_id: str, piece: Piece, now_s: float) -> None:
        """Keep a piece of a prompt that has no source yet."""
        while self._early and now_s - next(iter(self._early.values()))[0] > MAX_EARLY_S:
            self._early.popitem(last=False)
        if seq_id not in self._early and len(self._early) >= MAX_EARLY_PROMPTS:
            self._early.popitem(last=False)
        self._early.setdefault(seq_id, (now_s, []))[1].append(piece)

    def take_early(self, seq_id: str) -> list[Piece]:
        return self._early.pop(seq_id, (0.0, []))[1]
