"""Whether a queued sequence may get its blocks now, beyond there being room for them.

    obstacle ─ none ─► place ─► admitted ─► grown … ─► ended
                                   │           └─ past its reservation: one misprediction
                                   └─ sets its expected blocks aside

Two settings keep room for those that run: a share of all blocks that stays free (``engine.admission_watermark``), and
blocks for the output that is expected of each (``engine.reserve_output``): of its max_tokens the share that requests
have used so far, times the setting. Neither stops a sequence that would be alone.
"""

from __future__ import annotations

import math

from services.engine.roster import Roster
from services.engine.sequence import Phase, Sequence
from services.engine_config import EngineConfig

_EWMA = 0.1  # weight of the latest request


class Admission:
    """Decides, and learns from the ends of requests; the roster moves the blocks."""

    def __init__(self, roster: Roster, rules: EngineConfig) -> None:
        self._roster = roster
        self._factor = rules.reserve_output
        self._kept_free = math.floor(rules.admission_watermark * roster.limits.num_blocks)
        self.output_share = 1.0  # of max_tokens that requests generate, a moving mean
        self.mispredictions = 0  # sequences that outgrew what was set aside for them
        self.held_back = 0  # sequences that the watermark alone has stopped at least once

    def obstacle(self, seq: Sequence) -> str:
        """Why a queued sequence cannot get its blocks now; empty where it can."""
        roster = self._roster
        if self.is_held_up(seq):
            return "hand-offs hold half the pool"
        if not self.fits(seq):
            return "blocks"
        ahead = self._output_blocks(seq)
        if not (ahead or self._kept_free) or self.fits(seq, ahead + self._kept_free) or roster.is_alone(seq):
            return ""
        if ahead and not self.fits(seq, ahead):
            return "blocks for output"
        self.held_back += not seq.was_held_back
        seq.was_held_back = True
        return "watermark"

    def is_held_up(self, seq: Sequence) -> bool:
        """Whether a hand-off has to wait for others to be fetched, however much room there is.

        While any is held, those that are computed count too: so what readers do not fetch fills half of the pool, and
        one prompt more at most.
        """
        roster = self._roster
        if not seq.hand_off or not roster.held_blocks:
            return False
        coming = sum(len(s.block_ids) for s in (*roster.running.values(), *roster.loading.values()) if s.hand_off)
        return (roster.held_blocks + coming) * 2 >= roster.limits.num_blocks

    def fits(self, seq: Sequence, spare: int = 0) -> bool:
        """Whether the pool takes all blocks that a queued sequence brings and one to grow, if it ever will, for each
        choice, and has ``spare`` ones left (negative: were so many free besides).

        A pool that could never take so many has to be empty: choices wait for one another there.
        """
        limits = self._roster.limits
        most = seq.num_tokens
        if not seq.hand_off:
            most = limits.most_tokens(seq.num_prompt_tokens, seq.num_tokens, seq.sampling.max_tokens)
        need = min(limits.blocks(seq.num_tokens) + 1, limits.blocks(most))
        if not seq.hand_off and len(seq.choices) > 1:
            shared = seq.num_tokens // limits.block_size
            need = min(shared + (need - shared) * len(seq.choices), limits.num_blocks)
        return self._roster.pool.can_acquire(max(0, need + spare), self._roster.reusable_names(seq))

    def admitted(self, seq: Sequence) -> None:
        """A sequence has just been placed."""
        seq.expected_blocks = self._expected_blocks(seq) if self._factor else 0

    def grown(self, seq: Sequence) -> None:
        """A running sequence has got one block more."""
        if seq.expected_blocks and len(seq.block_ids) > seq.expected_blocks:
            seq.expected_blocks = 0
            self.mispredictions += 1

    def ended(self, seq: Sequence, num_outputs: int) -> None:
        """A request came to its end by itself after so many tokens."""
        share = num_outputs / seq.sampling.max_tokens
        self.output_share += _EWMA * (min(1.0, share) - self.output_share)

    def _output_blocks(self, seq: Sequence) -> int:
        """Blocks that this sequence and those that hold some are expected to take later."""
        if not self._factor:
            return 0
        holding = [s for s in self._roster.sequences.values() if s.expected_blocks and s.phase is not Phase.HELD]
        owed = sum(max(0, s.expected_blocks - len(s.block_ids)) for s in holding if s.block_ids)
        own = self._expected_blocks(seq) - self._roster.limits.blocks(seq.num_tokens) - 1
        return owed + max(0, own) * len(seq.choices)

    def _expected_blocks(self, seq: Sequence) -> int:
        if seq.hand_off:
            return 0
        limits, most = self._roster.limits, seq.sampling.max_tokens
        outputs = min(most, math.ceil(self.output_share * self._factor * most))
        return limits.blocks(limits.most_tokens(seq.num_prompt_tokens, seq.num_tokens, outputs))
