"""Runs what the scheduler decided: packs the batch, calls the model, samples, and counts what was really computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from kvstore.tensors import KVMemory
from services.engine.batch import PagedMemory, Span
from services.engine.draws import Drawer, Taken, wanted_rows
from services.engine.grammar import Grammars
from services.engine.intake import Limits
from services.engine.loader import LoadedModel
from services.engine.pooling import Pooling
from services.engine.sequence import Work

log = logging.getLogger("pdray.engine")

OnLayer = Callable[[int], None]
_BAD_KV = "the model's numbers are not finite: they overflowed, or the KV is damaged"


@dataclass(frozen=True, slots=True)
class Tally:
    """Tokens forwarded, by why; the three kinds add up to ``tokens_forwarded``."""

    prompt_tokens_computed: int = 0
    decode_tokens_forwarded: int = 0
    tokens_recomputed: int = 0
    tokens_forwarded: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))


@dataclass(frozen=True, slots=True)
class Executed:
    """What came out of a step, and what it took."""

    taken: Taken
    tally: Tally


class Runner:
    """Owns the model and the views of the KV memory."""

    def __init__(
        self, model: LoadedModel, layers: Sequence[torch.Tensor], limits: Limits, grammars: Grammars | None = None
    ) -> None:
        """Args: layers: of each layer [blocks, 2, kv_heads, block_size, head_dim], see `KVMemory.layer`."""
        self.model = model
        self._memory = PagedMemory.over(layers)
        self.grammars = grammars
        self._drawer = Drawer(limits, grammars)
        self._pooling = Pooling(model.path.hidden_size)

    @classmethod
    def over(cls, model: LoadedModel, memory: KVMemory, limits: Limits, grammars: Grammars | None = None) -> Runner:
        layers = [memory.layer(0, i) for i in range(memory.geometry.groups[0].num_layers)]
        return cls(model, layers, limits, grammars)

    def execute(self, work: Sequence[Work], on_layer: OnLayer | None = None) -> Executed:
        """Compute one step. Sequences that cannot be computed are named in ``failures``; the others go on.

        ``on_layer`` is called with each layer's index when K and V of the whole batch are in the memory. What a failed
        sequence wrote is wiped before this returns.
        """
        try:
            done = self._forward(work, on_layer)
        except Exception as exc:
            log.exception("a step of %d sequences failed, trying them one by one", len(work))
            done = self._one_by_one(work, exc)
        damaged = [w.sequence for w in work if w.sequence.seq_id in done.taken.failures]
        for seq in damaged:
            self._memory.zero_blocks(seq.block_ids[seq.num_named_blocks :])
        return done

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `PagedMemory.copy_blocks`."""
        self._memory.copy_blocks(pairs)

    def warm_up(self) -> None:
        """One decode and one chunk over block 0, which is wiped; the first real step is then as fast as the others."""
        size = self._memory.block_size
        for span in (Span([0] * min(size, 8), 0, [0]), Span([0], 1, [0])):
            self.model.path.forward(self._memory, [span], [(0, 0)])
        self._memory.zero_blocks([0])

    def _one_by_one(self, work: Sequence[Work], cause: Exception) -> Executed:
        taken = Taken()
        tally = Tally()
        for item in work:
            try:
                if len(work) == 1:
                    raise cause
                done = self._forward([item], None)
            except Exception as exc:  # whatever torch raises, this sequence alone ends with it
                failure = f"computing {item.count} tokens failed: {exc}"
                taken |= Taken(failures={item.sequence.seq_id: failure})
                continue
            taken |= done.taken
            tally += done.tally
        return Executed(taken, tally)

    def _forward(self, work: Sequence[Work], on_layer: OnLayer | None) -> Executed:
        spans = [Span(w.sequence.token_ids[w.start : w.stop], w.start, w.sequence.block_ids) for w in work]
        wanted = wanted_rows(work)
        sums = self._pooling.sums(work)
        done = self.model.path.forward(self._memory, spans, wanted.rows, on_layer, sums)
        failures = {item.sequence.seq_id: _BAD_KV for item, sound in zip(work, done.sound, strict=True) if not sound}
        taken = self._drawer.take(work, wanted, done.logits, failures)
        if sums:
            taken = replace(taken, pooled=self._pooling.take(work, sums, taken.failures))
        return Executed(taken, tally_of(work, sum(len(span.token_ids) for span in spans)))


def tally_of(work: Sequence[Work], tokens_forwarded: int) -> Tally:
    """Sort the tokens of a batch by why they were computed.

    Recomputed is what was computed before: here, by the writer of a hand-off, or, of outputs that came with a request,
    by the worker that sent them.
    """
    prompt = recomputed = 0
    for item in work:
        seq = item.sequence
        known = max(0, min(item.stop, seq.num_known_tokens) - item.start)
        fresh = item.start + known
        own_prompt = max(0, min(item.stop, seq.num_prompt_tokens) - fresh)
        came_along = max(0, min(item.stop, seq.num_given_tokens) - fresh - own_prompt)
        prompt += own_prompt
        recomputed += known + came_along
    return Tally(prompt, tokens_forwarded - prompt - recomputed, recomputed, tokens_forwarded)
