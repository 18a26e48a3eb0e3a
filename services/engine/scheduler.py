"""What each step computes: pure, no clock, no I/O; one block pool, one thread.

A request is `num_computed_tokens` catching up with its tokens. A step:

    1  decodes, one token each; who finds no block for it preempts the last in order
    2  prefill chunks within what is left of the token budget, placing waiting sequences as their turn comes
    3  reserves of sequences that a peer will fill

Order is priority (lower first), then arrival. A sequence that does not fit now lets later ones pass, `MAX_OVERTAKEN`
times at most; one that was preempted lets none pass. A sequence is placed only if the pool takes all that it brings and
one block more, so a started prefill never waits for blocks, and an open hand-off is never preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.engine.budget import share_budget
from services.engine.intake import Limits, check_sequence
from services.engine.messages import AddSequence, ReserveSequence, SequenceOutput, StartSequence
from services.engine.roster import Roster
from services.engine.sequence import Phase, Sequence, Work
from services.protocol.errors import invalid

MAX_OVERTAKEN = 32
_LOOK_AHEAD = 32  # queued sequences looked at in a step
_MAX_BLOCKED = 8  # of them that may turn out not to fit before the rest is left for the next step


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute now, decodes first, and what was decided on the way."""

    number: int
    work: tuple[Work, ...]
    started: tuple[Sequence, ...]  # placed for the first time; their first chunk follows
    reserved: tuple[Sequence, ...]  # hold blocks from now on
    preemptions: int
    waiting: Mapping[str, int]  # why sequences wait: reason -> how many of those looked at


class Scheduler:
    """Decides; its `roster` keeps the books."""

    def __init__(self, pool: BlockPool, limits: Limits, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.limits = limits
        self.roster = Roster(pool, limits)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._step = 0
        self._turns = 0
        self._paused = 0

    def add(self, message: AddSequence) -> None:
        """Queue a sequence to compute. Raises RequestError where it cannot be served here."""
        self._check(message)
        self.roster.enroll(message, Phase.WAITING)

    def reserve(self, message: ReserveSequence) -> None:
        """Queue a sequence whose KV a peer will write. Raises RequestError where it never fits or is wrong."""
        self._check(message.sequence)
        if message.sequence.hand_off:
            raise invalid("a reserved sequence cannot be handed off")
        self.roster.enroll(message.sequence, Phase.RESERVING)

    def start(self, message: StartSequence) -> SequenceOutput | None:
        """A peer's KV is verified: decode, with token 1 as the first output. None for a sequence not reserved here."""
        seq = self.roster.sequences.get(message.seq_id)
        if seq is None or seq.phase is not Phase.RESERVED:
            return None
        self.roster.begin(seq)
        if not 0 <= message.first_token < self.limits.vocab_size:
            return self.roster.fail(seq, f"token 1 has the id {message.first_token}, outside the vocabulary")
        return self.roster.append(seq, message.first_token)

    def release(self, seq_id: str, *, quarantine: bool = False) -> None:
        """Forget a sequence in any state, without an output. Unknown ones are ignored."""
        seq = self.roster.sequences.get(seq_id)
        if seq is not None:
            self.roster.release(seq, quarantine=quarantine)

    def abort(self, seq_id: str, *, quarantine: bool = False) -> SequenceOutput | None:
        """`release`, and the output that ends the sequence; None for an unknown one."""
        seq = self.roster.sequences.get(seq_id)
        if seq is None:
            return None
        self.roster.release(seq, quarantine=quarantine)
        return SequenceOutput(seq_id=seq_id, position=seq.num_outputs, token_ids=(), finish_reason="abort")

    @property
    def num_running(self) -> int:
        """Sequences that the next step can compute; those that found no block are left out."""
        return len(self.roster.running) - self._paused

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute before all sequences here can give their next token; prefix hits are not foreseen."""
        started = (s.num_missing_tokens for s in self.roster.running.values())
        return self.roster.queued_tokens + sum(n for n in started if n > 1)

    def schedule(self) -> Step:
        """Decide the next step. The caller runs it and calls `complete` with what came out."""
        self._step += 1
        preemptions = self.roster.preemptions
        waiting: Counter[str] = Counter()
        decodes = self._decodes(waiting)
        prefills, started = self._prefills(decodes, waiting)
        reserved = self._reserves(waiting)
        work = (*decodes.values(), *prefills)
        for item in work:
            self._turns += 1
            item.sequence.last_turn = self._turns
        return Step(self._step, work, started, reserved, self.roster.preemptions - preemptions, waiting)

    def complete(self, step: Step, tokens: Mapping[str, int], failures: Mapping[str, str]) -> list[SequenceOutput]:
        """Take in what the step computed.

        Args:
            tokens: the sampled token of each sequence whose work `samples`.
            failures: sequences that cannot go on, and why; nothing of this step gets a name for them.
        """
        outputs = []
        for work in step.work:
            seq = work.sequence
            if seq.seq_id in failures:
                outputs.append(self.roster.fail(seq, failures[seq.seq_id]))
                continue
            samples = work.samples
            seq.num_computed_tokens = work.stop
            seq.num_known_tokens = max(seq.num_known_tokens, work.stop)
            self.roster.name_blocks(seq)
            if samples:
                outputs.append(self.roster.append(seq, tokens[seq.seq_id]))
        return outputs

    def _check(self, message: AddSequence) -> None:
        if message.seq_id in self.roster.sequences:
            raise invalid(f"sequence {message.seq_id} is here already")
        check_sequence(message, self.limits)

    # -- decodes -------------------------------------------------------------------------------------------------------

    def _decodes(self, waiting: Counter[str]) -> dict[str, Work]:
        """One token for each sequence that lacks one; those left out longest go first among equal priorities."""
        self._paused = 0
        active = sorted(self.roster.running.values(), key=lambda s: s.order)[: self.max_num_seqs]
        ready = [s for s in active if s.num_missing_tokens == 1]
        ready.sort(key=lambda s: (s.priority, s.last_turn, s.arrival))
        work: dict[str, Work] = {}
        for seq in ready:
            if len(work) >= self.max_num_batched_tokens:
                waiting["token budget"] += 1
            elif seq.phase is Phase.RUNNING and self._make_room(seq, work):
                work[seq.seq_id] = Work(seq, seq.num_computed_tokens, 1)
            elif seq.phase is Phase.RUNNING:
                self._paused += 1
                waiting["blocks"] += 1
        return work

    def _make_room(self, seq: Sequence, work: dict[str, Work]) -> bool:
        """Give the sequence a block for its next token, at the cost of the last in order.

        False: it was the last itself and lost its blocks, or all others are open hand-offs, which will let go.
        """
        roster = self.roster
        while seq.num_computed_tokens >= len(seq.block_ids) * self.limits.block_size:
            try:
                seq.block_ids += roster.pool.extend(seq.seq_id)
            except OutOfBlocks:
                victims = [s for s in roster.running.values() if not s.hand_off]
                victim = max(victims, key=lambda s: s.order)
                if len(victims) == 1 and not roster.is_alone(seq):
                    return False
                roster.preempt(victim)
                work.pop(victim.seq_id, None)
                if victim is seq:
                    return False
        return True

    # -- prefills ------------------------------------------------------------------------------------------------------

    def _prefills(self, decodes: Mapping[str, Work], waiting: Counter[str]) -> tuple[list[Work], tuple[Sequence, ...]]:
        """Chunks, and the sequences placed for the first time."""
        budget = self.max_num_batched_tokens - len(decodes)
        slots = self.max_num_seqs - len(decodes)
        candidates, wants = self._candidates(slots, waiting)
        started: list[Sequence] = []
        blocked: list[Sequence] = []
        while True:
            chosen = candidates[:slots]
            grants = share_budget([wants[s.seq_id] for s in chosen], budget)
            given = [(s, tokens) for s, tokens in zip(chosen, grants, strict=True) if tokens]
            turn = next((s for s, _ in given if s.phase is Phase.WAITING), None)
            if turn is None:
                break
            is_new = not turn.was_placed
            if self._place(turn, blocked, waiting):
                wants[turn.seq_id] = turn.num_missing_tokens
                started += [turn] if is_new else []
                continue
            rest = candidates[candidates.index(turn) + 1 :]
            if _is_barrier(turn) or len(blocked) >= _MAX_BLOCKED:
                rest = [s for s in rest if s.phase is Phase.RUNNING]
            candidates[candidates.index(turn) :] = rest
        return [Work(s, s.num_computed_tokens, tokens) for s, tokens in given], tuple(started)

    def _candidates(self, slots: int, waiting: Counter[str]) -> tuple[list[Sequence], dict[str, int]]:
        """Unfinished prompts in order, running and queued, and the tokens each one wants.

        A queued one whose prefix is being computed for another is left for later: it will find the blocks.
        """
        roster = self.roster
        found = sorted((s for s in roster.running.values() if s.num_missing_tokens > 1), key=lambda s: s.order)[:slots]
        wants = {s.seq_id: s.num_missing_tokens for s in found}
        if len(roster.running) >= self.max_num_seqs:
            waiting["sequence slots"] += len(roster.queue)
            return found, wants
        coming = {name: s for s in reversed(found) for name in s.names[s.num_named_blocks :]}
        for seq in roster.queue[:_LOOK_AHEAD]:
            if seq.phase is not Phase.WAITING:
                continue
            names = roster.reusable_names(seq)
            hits = roster.pool.lookup(names)
            ahead = coming.get(names[hits]) if hits + 1 < len(names) else None
            if ahead is not None and ahead.order < seq.order:
                waiting["prefix being computed"] += 1
                continue
            wants[seq.seq_id] = seq.num_tokens - hits * self.limits.block_size
            found.append(seq)
            if roster.fits(seq):
                coming.update({name: seq for name in names[hits:] if name not in coming})
        found.sort(key=lambda s: s.order)
        return found, wants

    def _place(self, seq: Sequence, blocked: list[Sequence], waiting: Counter[str]) -> bool:
        """Place a queued sequence if it may be now; else it is blocked, and later ones count as passing it."""
        roster = self.roster
        if seq.hand_off and roster.held_blocks * 2 >= self.limits.num_blocks:
            reason = "hand-offs hold half the pool"
        elif seq.phase is Phase.WAITING and len(roster.running) >= self.max_num_seqs:
            reason = "sequence slots"
        elif not roster.fits(seq):
            reason = "blocks"
        else:
            roster.place(seq)
            for other in blocked:
                other.num_overtaken += 1
            return True
        waiting[reason] += 1
        blocked.append(seq)
        return False

    # -- reserves ------------------------------------------------------------------------------------------------------

    def _reserves(self, waiting: Counter[str]) -> tuple[Sequence, ...]:
        """Give blocks to sequences that a peer will fill; twice as many as may run at once, so that slots stay full."""
        roster = self.roster
        placed: list[Sequence] = []
        blocked: list[Sequence] = []
        for seq in roster.queue[:_LOOK_AHEAD]:
            if seq.phase is Phase.WAITING:
                if seq.was_placed:
                    break  # it was preempted, and gets its blocks back first
            elif len(roster.running) + roster.num_reserved >= 2 * self.max_num_seqs:
                waiting["sequence slots"] += 1
            elif len(blocked) < _MAX_BLOCKED and not any(_is_barrier(s) for s in blocked):
                placed += [seq] if self._place(seq, blocked, waiting) else []
            else:
                waiting["blocks"] += 1
        return tuple(placed)


def _is_barrier(seq: Sequence) -> bool:
    """Later sequences may no longer pass it."""
    return seq.was_placed or seq.num_overtaken >= MAX_OVERTAKEN
