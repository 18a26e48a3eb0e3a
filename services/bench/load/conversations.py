"""Conversations: each turn asks with everything said before it, answers included, and comes after a time to think.

    start (by the clock) ─► turn 1 ─► answer ─► think ─► turn 2 = turn 1 + answer + new words ─► …

What the model answered is known only then, so prompts are text, and the client writes a turn when the answer before it
has come. Lengths of later turns are plans: the answers that are asked for, not those that came.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.arrivals import unit_gaps
from services.bench.load.prompts import Segment, num_tokens
from services.bench.load.workloads import Item

_SYSTEM, _TURN, _THINK = 5, 6, 7
"""First number of a segment's key after the seed, and of the seed of the times to think."""


@dataclass(frozen=True, slots=True)
class Turn:
    item: Item
    think_s: float  # after the answer before it; 0 for the first


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn:
    """Conversations of ``num_turns`` turns, all with the same ``prefix_tokens`` in front."""

    num_turns: int = 4
    first_tokens: int = 256
    next_tokens: int = 64
    output_tokens: int = 64
    prefix_tokens: int = 0
    think_s: float = 1.0  # mean
    think_burstiness: float = 1.0  # gamma shape: 1 exponential, inf constant

    def __post_init__(self) -> None:
        if min(self.num_turns, self.first_tokens, self.next_tokens, self.output_tokens) < 1 or self.prefix_tokens < 0:
            raise ConfigError("--multi-turn-* counts and lengths must be at least 1, the prefix at least 0")
        if not 0 <= self.think_s < float("inf"):
            raise ConfigError(f"--multi-turn-think-time-s must be at least 0 and finite, got {self.think_s}")

    def items(self, count: int, seed: int) -> list[Item]:
        """First turns only: for warm-ups."""
        return [turns[0].item for turns in self.conversations(count * self.num_turns, seed)]

    def conversations(self, num_requests: int, seed: int) -> list[list[Turn]]:
        """Conversations with ``num_requests`` turns in all; the last one may be shorter."""
        made: list[list[Turn]] = []
        rng = np.random.default_rng((seed, _THINK))
        while num_requests > 0:
            length = min(self.num_turns, num_requests)
            thinks = unit_gaps(length, self.think_burstiness, rng) * self.think_s
            turns: list[Turn] = []
            context = 0
            for k in range(length):
                item = self._item(seed, len(made), k, context)
                turns.append(Turn(item, float(thinks[k]) if k else 0.0))
                context += num_tokens(item.prompt) + item.output_tokens
            made.append(turns)
            num_requests -= length
        return made

    def _item(self, seed: int, conversation: int, turn: int, context_tokens: int) -> Item:
        own = Segment((seed, _TURN, conversation, turn), self.next_tokens if turn else self.first_tokens)
        has_prefix = self.prefix_tokens > 0 and turn == 0
        prompt = (Segment((seed, _SYSTEM), self.prefix_tokens), own) if has_prefix else (own,)
        return Item(prompt, self.output_tokens, context_tokens=context_tokens)
