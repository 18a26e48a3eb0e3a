"""Who gets blocks next: queued prompts, reserves for peers, and urgent ones at the cost of others.

    queue ─ first in the policy's order ─┬─ candidates ─ turn in the budget ─► place ─► RUNNING, or LOADING before it
                                         ├─ claim: more urgent than one that runs ─► RUNNING, the other is preempted
                                         └─ reserves ─────────────────────────► place ─► RESERVED

A sequence that does not fit now lets later ones pass, `MAX_OVERTAKEN` times at most. A barrier lets none pass: one that
was preempted, was passed so often, or has waited for the ageing bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from services.engine.admission import Admission
from services.engine.roster import Roster
from services.engine.sequence import Phase, Sequence
from services.engine_config import EngineConfig

MAX_OVERTAKEN = 32
_LOOK_AHEAD = 32  # queued sequences looked at in a step
_MAX_BLOCKED = 8  # of them that may turn out not to fit before the rest is left for the next step


class Placing:
    """Decides who of the queue starts; its `roster` moves them."""

    def __init__(self, roster: Roster, admission: Admission, rules: EngineConfig, max_num_seqs: int) -> None:
        self._roster = roster
        self._admission = admission
        self._rules = rules
        self._max_num_seqs = max_num_seqs
        self._batch: set[str] = set()  # groups that may run, where batching is not continuous

    def candidates(
        self, slots: int, claimed: Collection[Sequence], waiting: Counter[str]
    ) -> tuple[list[Sequence], dict[str, int]]:
        """Unfinished prompts in order, running and queued, and the tokens each one wants.

        What has just ``claimed`` room is among them though only its last token be missing: it is no decode yet.

        A queued one whose prefix is being computed or loaded for another is left for later: it will find the blocks.
        """
        roster = self._roster
        unfinished = (s for s in roster.running.values() if s.num_missing_tokens > 1 or s in claimed)
        found = sorted(unfinished, key=lambda s: s.order)[:slots]
        wants = {s.seq_id: s.num_missing_tokens for s in found}
        if not roster.queue:
            return found, wants
        if roster.running_choices >= self._max_num_seqs:
            waiting["sequence slots"] += len(roster.queue)
            return found, wants
        ahead_of_all = sorted([*found, *roster.loading.values()], key=lambda s: s.order)
        coming = {name: s for s in reversed(ahead_of_all) for name in s.names[s.num_named_blocks :]}
        place_of = {s.seq_id: self._place_of(s, 0) for s in ahead_of_all}
        for nth, seq in enumerate(self._first()):
            if seq.phase is not Phase.WAITING:
                continue
            names = roster.reusable_names(seq)
            hits = roster.count_hits(seq)
            place = self._place_of(seq, nth + 1)
            if hits < len(names):
                ahead = coming.get(names[hits])
                if ahead is not None and place_of[ahead.seq_id] < place and self._will_come(ahead):
                    waiting["prefix being loaded" if ahead.phase is Phase.LOADING else "prefix being computed"] += 1
                    continue
                coming[names[hits]] = seq  # who shares this name shares all before it
            wants[seq.seq_id] = seq.num_tokens - hits * roster.limits.block_size
            place_of[seq.seq_id] = place
            found.append(seq)
        found.sort(key=lambda s: place_of[s.seq_id])
        return found, wants

    def place(self, seq: Sequence, blocked: list[Sequence], waiting: Counter[str]) -> bool:
        """Place a queued sequence if it may be now; else it is blocked, and later ones count as passing it."""
        reason = self._obstacle(seq)
        if reason:
            waiting[reason] += 1
            blocked.append(seq)
            return False
        self._place(seq)
        for other in blocked:
            other.num_overtaken += 1
        return True

    def rest(self, seq: Sequence, later: list[Sequence], blocked: list[Sequence]) -> list[Sequence]:
        """Of those behind one that was not placed, who may still have its turn."""
        if is_barrier(seq) or len(blocked) >= _MAX_BLOCKED:
            return [s for s in later if s.phase is Phase.RUNNING]
        return later

    def reserves(self, waiting: Counter[str]) -> tuple[Sequence, ...]:
        """Give blocks to sequences that a peer will fill; twice as many as may run at once, so that slots stay full."""
        roster = self._roster
        placed: list[Sequence] = []
        blocked: list[Sequence] = []
        for seq in self._first() if roster.num_reserving else ():
            if seq.phase is Phase.WAITING:
                if seq.was_placed:
                    break  # it was preempted, and gets its blocks back first
            elif roster.running_choices + roster.num_reserved >= 2 * self._max_num_seqs:
                waiting["sequence slots"] += 1
            elif len(blocked) < _MAX_BLOCKED and not any(is_barrier(s) for s in blocked):
                placed += [seq] if self.place(seq, blocked, waiting) else []
            else:
                waiting["blocks"] += 1
        return tuple(placed)

    def claim(self) -> list[Sequence]:
        """Start queued prompts that find no room, at the cost of less urgent ones that run; each may try once."""
        roster = self._roster
        if not roster.policy.claims_room or not roster.queue or not roster.running:
            return []
        started: list[Sequence] = []
        lowest = max(s.rank for s in roster.running.values())
        for seq in self._first():
            if is_barrier(seq) or seq.rank >= lowest:
                break
            if seq.phase is Phase.WAITING and not seq.has_claimed and self._make_way(seq):
                self._place(seq)
                started += [] if seq.load_blocks else [seq]
        return started

    def _will_come(self, seq: Sequence) -> bool:
        """Whether a prompt that others wait for is computed or loaded, or could be now."""
        return seq.phase in (Phase.RUNNING, Phase.LOADING) or self._admission.fits(seq)

    def _make_way(self, seq: Sequence) -> bool:
        """Preempt from the last in order on until the sequence finds room; nobody is, where that would not do."""
        roster = self._roster
        if self._obstacle(seq) not in ("blocks", "sequence slots"):
            return False
        victims = [s for s in roster.running.values() if not s.hand_off and not s.is_aged and s.rank > seq.rank]
        won = roster.pool.would_free([s.seq_id for s in victims])
        if not victims or self._admission.is_held_up(seq) or not self._admission.fits(seq, -won):
            return False
        seq.has_claimed = True
        victims.sort(key=lambda s: s.order)
        while victims and self._obstacle(seq):
            roster.preempt(victims.pop())
        return not self._obstacle(seq)

    def _place(self, seq: Sequence) -> None:
        self._roster.place(seq)
        self._admission.admitted(seq)

    def _obstacle(self, seq: Sequence) -> str:
        if seq.phase is Phase.WAITING and self._roster.running_choices >= self._max_num_seqs:
            return "sequence slots"
        if len(self._roster.loading) >= self._max_num_seqs and self._roster.count_loadable(seq):
            return "load slots"
        return self._admission.obstacle(seq)

    def _place_of(self, seq: Sequence, nth: int) -> tuple[bool, int, int, int]:
        """Where a prompt stands among the others; ``nth`` in the queue, 0: it runs."""
        if self._roster.policy.ranks_started:
            return (*seq.order, 0)
        return not seq.is_aged, 0, nth, seq.arrival

    def _first(self) -> list[Sequence]:
        """The queued sequences to look at now, in the policy's order."""
        roster = self._roster
        if self._rules.batching == "continuous":
            return roster.queue.first(_LOOK_AHEAD, roster.clock)
        self._batch &= roster.groups.keys()
        waiting = roster.queue.first(len(roster.queue), roster.clock)
        if not self._batch:
            size = 1 if self._rules.batching == "request" else self._max_num_seqs
            self._batch = {s.group_id for s in waiting[:size]}
        return [s for s in waiting if s.group_id in self._batch][:_LOOK_AHEAD]


def is_barrier(seq: Sequence) -> bool:
    """Later sequences may not pass it."""
    return seq.was_placed or seq.is_aged or seq.num_overtaken >= MAX_OVERTAKEN
