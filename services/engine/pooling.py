"""Means of a prompt's last hidden states, summed up chunk by chunk in float32.

    sums(work) ─► the path adds to them ─► take(work, sums) ─┬─ the prompt goes on ─► kept for its next chunk
                                                             └─ it is computed ─► its mean, as bytes

A prompt that is preempted begins again, and so does its sum. Nothing of it comes from the prefix cache, which holds no
hidden states, and nothing of it goes there: texts to embed are many and seldom begin an answer, so they would only push
out what does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from services.engine.sequence import Sequence as EngineSequence
from services.engine.sequence import Work


class Pooling:
    """Sums of one engine; they live as long as their sequences do."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._kept: WeakKeyDictionary[EngineSequence, torch.Tensor] = WeakKeyDictionary()

    def sums(self, work: Sequence[Work]) -> dict[int, torch.Tensor]:
        """By index of a work that pools: what came before it, float32 [hidden_size], to be added to. A step that fails
        may be computed again: what was kept changes with `take` alone."""
        return {i: self._before(item) for i, item in enumerate(work) if item.sequence.pools}

    def take(self, work: Sequence[Work], sums: Mapping[int, torch.Tensor], failed: Collection[str]) -> dict[str, bytes]:
        """Means of the prompts that are computed now, by sequence id. ``failed``: sequence ids left out."""
        done = {}
        for i, total in sums.items():
            seq = work[i].sequence
            if work[i].samples:
                self._kept.pop(seq, None)
                if seq.seq_id not in failed:
                    done[seq.seq_id] = (total / seq.num_tokens).numpy().astype("<f4").tobytes()
            else:
                self._kept[seq] = total
        return done

    def _before(self, work: Work) -> torch.Tensor:
        return self._kept[work.sequence].clone() if work.start else torch.zeros(self._hidden_size)
