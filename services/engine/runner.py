"""Runs what the scheduler decided: packs the batch, calls the model, samples, and counts what was really computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from kvstore.tensors import KVMemory
from services.engine.batch import PagedMemory, Span, pack
from services.engine.intake import Limits
from services.engine.loader import LoadedModel, forward
from services.engine.sampler import BadLogits, Draw, sample
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
    """What came out of a step."""

    tokens: Mapping[str, int]  # the next token of each sequence that samples
    failures: Mapping[str, str]  # why a sequence cannot go on
    tally: Tally


class Runner:
    """Owns the model and the views of the KV memory."""

    def __init__(self, model: LoadedModel, layers: Sequence[torch.Tensor], limits: Limits) -> None:
        """Args: layers: of each layer [blocks, 2, kv_heads, block_size, head_dim], see `KVMemory.layer`."""
        self.model = model
        self._memory = PagedMemory.over(layers)
        self._limits = limits

    @classmethod
    def over(cls, model: LoadedModel, memory: KVMemory, limits: Limits) -> Runner:
        layers = [memory.layer(0, i) for i in range(memory.geometry.groups[0].num_layers)]
        return cls(model, layers, limits)

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
        damaged = [w.sequence for w in work if w.sequence.seq_id in done.failures]
        for seq in damaged:
            self._memory.zero_blocks(seq.block_ids[seq.num_named_blocks :])
        return done

    def warm_up(self) -> None:
        """One decode and one chunk over block 0, which is wiped; the first real step is then as fast as the others."""
        size = self._memory.block_size
        for span in (Span([0] * min(size, 8), 0, [0]), Span([0], 1, [0])):
            forward(self.model, pack(self._memory, self.model.backend, [span]), torch.tensor([0]))
        self._memory.zero_blocks([0])

    def _one_by_one(self, work: Sequence[Work], cause: Exception) -> Executed:
        tokens: dict[str, int] = {}
        failures: dict[str, str] = {}
        tally = Tally()
        for item in work:
            try:
                if len(work) == 1:
                    raise cause
                done = self._forward([item], None)
            except Exception as exc:  # whatever torch raises, this sequence alone ends with it
                failures[item.sequence.seq_id] = f"computing {item.count} tokens failed: {exc}"
                continue
            tokens.update(done.tokens)
            failures.update(done.failures)
            tally += done.tally
        return Executed(tokens, failures, tally)

    def _forward(self, work: Sequence[Work], on_layer: OnLayer | None) -> Executed:
        spans = [Span(w.sequence.token_ids[w.start : w.stop], w.start, w.sequence.block_ids) for w in work]
        batch = pack(self._memory, self.model.backend, spans, on_layer)
        sampling = [i for i, w in enumerate(work) if w.samples]
        rows = torch.tensor([batch.ends[i] for i in sampling], dtype=torch.int64, device=batch.input_ids.device)
        logits, finite = forward(self.model, batch, rows)
        failures: dict[str, str] = {}
        if not bool(finite.all()):
            sound = finite.tolist()
            for i, item in enumerate(work):
                if not all(sound[batch.starts[i] : batch.ends[i] + 1]):
                    failures[item.sequence.seq_id] = _BAD_KV
        tokens: dict[str, int] = {}
        if sampling:
            drawn = sample(logits, [self._draw(work[i]) for i in sampling])
            for i, token in zip(sampling, drawn, strict=True):
                seq_id = work[i].sequence.seq_id
                if isinstance(token, BadLogits):
                    failures.setdefault(seq_id, token.message)
                elif seq_id not in failures:
                    tokens[seq_id] = token
        return Executed(tokens, failures, tally_of(work, batch.input_ids.numel()))

    def _draw(self, work: Work) -> Draw:
        seq = work.sequence
        held_back = seq.num_outputs < seq.sampling.min_tokens
        return Draw(seq.sampling, seq.num_outputs, self._limits.end_tokens(seq.sampling) if held_back else ())


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
