"""What each step computes: pure, no clock, no I/O; one block pool, one thread.

A request is `num_computed_tokens` catching up with its tokens. A step:

    1  decodes, one token each; who finds no block for it preempts the last in order
    2  prefill chunks within what is left of the token budget, placing waiting sequences as their turn comes
    3  reserves of sequences that a peer will fill

Who goes first is the policy's (`services.engine.policies`), who of the queue starts is `services.engine.placing`'s. A
sequence is placed only if the pool takes all that it brings and one block more, so a started prefill never waits for
blocks, and an open hand-off is never preempted. The first in order is never preempted for a block: it always goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.engine.admission import Admission
from services.engine.budget import share_budget
from services.engine.ends import pooled_of
from services.engine.intake import Limits, check_sequence
from services.engine.messages import AddSequence, ReserveSequence, SequenceOutput, StartSequence
from services.engine.placing import Placing
from services.engine.roster import Roster
from services.engine.sequence import Phase, Sequence, Work
from services.engine_config import DEFAULT_ENGINE, EngineConfig
from services.protocol.errors import invalid


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute now, decodes first, and what was decided on the way."""

    number: int
    work: tuple[Work, ...]
    started: tuple[Sequence, ...]  # placed, and loaded where there was anything to load; their first chunk follows
    loading: tuple[Sequence, ...]  # placed; what a source has of them is to be loaded
    reserved: tuple[Sequence, ...]  # hold blocks from now on
    preemptions: int
    waiting: Mapping[str, int]  # why sequences wait: reason -> how many of those looked at


class Scheduler:
    """Decides; its `roster` keeps the books."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        rules: EngineConfig = DEFAULT_ENGINE,
    ) -> None:
        self.limits = limits
        self.rules = rules
        self.roster = Roster(pool, limits, rules)
        self.admission = Admission(self.roster, rules)
        self.placing = Placing(self.roster, self.admission, rules, max_num_seqs)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._steps_without_prompts = 0
        self._step = 0
        self._turns = 0
        self._paused = 0
        self._loaded: list[Sequence] = []  # run since the last step, and were not announced yet

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

    def start(self, message: StartSequence) -> list[SequenceOutput]:
        """A peer's KV is verified: decode, with token 1 of each choice as its first output. Choices without one are
        over. Nothing happens to a sequence that is not reserved here."""
        seq = self.roster.sequences.get(message.seq_id)
        if seq is None or seq.phase is not Phase.RESERVED:
            return []
        tokens = dict(message.first_tokens)
        for choice in [c for c in seq.choices if c not in tokens]:
            self.roster.drop(seq, choice)
        if message.seq_id not in self.roster.sequences:
            return []
        self.roster.begin(seq)
        wrong = next((t for t in tokens.values() if not 0 <= t < self.limits.vocab_size), None)
        if wrong is not None:
            return [self.roster.fail(seq, f"token 1 has the id {wrong}, outside the vocabulary")]
        return self._append(seq, tokens)

    def loaded(self, seq_id: str, num_blocks: int, *, quarantine: bool = False) -> None:
        """A load has ended, with its first ``num_blocks`` blocks verified; what is missing is computed.

        With ``quarantine`` a write may still land: none counts, and the sequence starts again with other blocks.
        Nothing happens to a sequence that is not LOADING.
        """
        seq = self.roster.loading.get(seq_id)
        if seq is None:
            return
        if quarantine:
            self.roster.unload(seq)
            return
        self.roster.loaded(seq, max(0, min(num_blocks, seq.load_blocks)), seq.offered_by)
        self._loaded.append(seq)

    def release(self, seq_id: str, *, quarantine: bool = False) -> None:
        """Forget a sequence in any state, and all its choices, without an output. Unknown ones are ignored."""
        for seq in list(dict.fromkeys(self.roster.groups.get(seq_id, {}).values())):
            is_written = quarantine and seq.seq_id == seq_id  # nobody else writes to choices that have parted
            self.roster.release(seq, quarantine=is_written)

    def abort(self, seq_id: str, *, quarantine: bool = False) -> SequenceOutput | None:
        """`release`, and the output that ends the sequence; None for an unknown one."""
        group = self.roster.groups.get(seq_id)
        if group is None:
            return None
        position = next(iter(group.values())).num_outputs
        self.release(seq_id, quarantine=quarantine)
        return SequenceOutput(seq_id=seq_id, position=position, token_ids=(), finish_reason="abort")

    def drop(self, seq_id: str, choice: int) -> None:
        """One choice is not wanted any more; unknown ones are ignored."""
        seq = self.roster.groups.get(seq_id, {}).get(choice)
        if seq is not None:
            self.roster.drop(seq, choice)

    @property
    def num_running(self) -> int:
        """Sequences that the next step can compute; those that found no block are left out."""
        return len(self.roster.running) - self._paused

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute before all sequences here can give their next token; prefix hits are not foreseen."""
        started = [s.num_missing_tokens for s in self.roster.running.values()]
        loaded = self.limits.block_size
        started += [s.num_missing_tokens - s.load_blocks * loaded for s in self.roster.loading.values()]
        return self.roster.queued_tokens + sum(n for n in started if n > 1)

    def schedule(self) -> Step:
        """Decide the next step. The caller runs it and calls `complete` with what came out."""
        self._step += 1
        preemptions = self.roster.preemptions
        waiting: Counter[str] = Counter()
        self.roster.age()
        work, placed = self._work(waiting)
        reserved = self.placing.reserves(waiting)
        for item in work:
            self._turns += 1
            item.sequence.last_turn = self._turns
        news = dict.fromkeys((*self._loaded, *placed))
        started = tuple(s for s in news if s.phase is Phase.RUNNING and not s.was_started)
        self._loaded = []
        for seq in started:
            seq.was_started = True
        preemptions = self.roster.preemptions - preemptions
        return Step(self._step, work, started, self.roster.take_loads(), reserved, preemptions, waiting)

    def complete(self, step: Step, tokens: Mapping[str, int], failures: Mapping[str, str]) -> list[SequenceOutput]:
        """Take in what the step computed.

        Args:
            tokens: what was sampled, by the keys that the step's works `draws`.
            failures: sequences that cannot go on, and why; nothing of this step gets a name for them.
        """
        outputs = []
        self.roster.clock += sum([work.count for work in step.work])
        for work in step.work:
            seq = work.sequence
            if seq.seq_id in failures:
                outputs.append(self.roster.fail(seq, failures[seq.seq_id]))
                continue
            draws, stop = work.draws, work.start + work.count
            seq.num_computed_tokens = stop
            seq.num_known_tokens = max(seq.num_known_tokens, stop)
            self.roster.name_blocks(seq)
            if seq.pools and work.samples:
                self.roster.release(seq)
                outputs.append(pooled_of(seq))
            elif draws:
                outputs += self._append(seq, {choice: tokens[key] for key, choice in draws})
        return outputs

    def _append(self, seq: Sequence, tokens: Mapping[int, int]) -> list[SequenceOutput]:
        seq.waits_since = self.roster.clock
        outputs = self.roster.append(seq, tokens)
        for output in outputs:
            if output.finish_reason and not seq.hand_off:
                self.admission.ended(seq, output.position + 1)
        return outputs

    def _check(self, message: AddSequence) -> None:
        if message.seq_id in self.roster.groups:
            raise invalid(f"sequence {message.seq_id} is here already")
        check_sequence(message, self.limits)

    def _work(self, waiting: Counter[str]) -> tuple[tuple[Work, ...], tuple[Sequence, ...]]:
        """What to compute, decodes first, and the sequences placed for it."""
        decoding = any(s.num_missing_tokens == 1 for s in self.roster.running.values())
        prompts_may = not decoding or self._is_turn_of_prompts()
        if prompts_may and decoding and not self.rules.mixed_batches:
            prefills, started = self._prefills({}, waiting)
            if prefills:
                self._steps_without_prompts = 0
                return tuple(prefills), started
            prompts_may = False
        decodes = self._decodes(waiting)
        prefills, started = self._prefills(decodes, waiting) if prompts_may or not decodes else ([], ())
        self._steps_without_prompts = 0 if prefills else self._steps_without_prompts + 1
        return (*decodes.values(), *prefills), started

    # -- decodes -------------------------------------------------------------------------------------------------------

    def _decodes(self, waiting: Counter[str]) -> dict[str, Work]:
        """One token for each sequence that lacks one; those left out longest go first among equal priorities.

        Who finds no block leaves its slot to those behind: what they hold may be what it waits for.
        """
        self._paused = 0
        active: Collection[Sequence] = self.roster.running.values()
        later: list[Sequence] = []
        if len(active) > self.max_num_seqs:
            ordered = sorted(active, key=lambda s: s.order)
            active, later = ordered[: self.max_num_seqs], ordered[self.max_num_seqs :]
        ready = [s for s in active if s.num_missing_tokens == 1]
        ready.sort(key=lambda s: (s.order[:2], s.last_turn, s.arrival))
        work: dict[str, Work] = {}
        for nth, seq in enumerate([*ready, *(s for s in later if s.num_missing_tokens == 1)]):
            if nth >= len(ready) + self._paused:
                break
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
                self.admission.grown(seq)
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

    def _prefills(self, decodes: dict[str, Work], waiting: Counter[str]) -> tuple[list[Work], tuple[Sequence, ...]]:
        """Chunks, and the sequences placed for them. Decodes that are preempted for one are taken out."""
        preemptions = self.roster.preemptions
        started = self.placing.claim()
        if self.roster.preemptions != preemptions:
            for seq_id in [k for k, work in decodes.items() if work.sequence.phase is not Phase.RUNNING]:
                del decodes[seq_id]
        budget = self.max_num_batched_tokens - len(decodes)
        slots = self.max_num_seqs - len(decodes)
        candidates, wants = self.placing.candidates(slots, started, waiting)
        blocked: list[Sequence] = []
        while True:
            chosen = candidates[:slots]
            is_alone = len(decodes) + len(chosen) == 1
            longest = 0 if is_alone else self.rules.long_prefill_threshold_tokens
            grants = share_budget([wants[s.seq_id] for s in chosen], budget, longest)
            given = [(s, tokens) for s, tokens in zip(chosen, grants, strict=True) if tokens]
            turn = next((s for s, _ in given if s.phase is Phase.WAITING), None)
            if turn is None:
                break
            if self.placing.place(turn, blocked, waiting):
                wants[turn.seq_id] = turn.num_missing_tokens
                if turn.phase is Phase.RUNNING:
                    started.append(turn)
                else:
                    candidates.remove(turn)
                continue
            at = candidates.index(turn)
            candidates[at:] = self.placing.rest(turn, candidates[at + 1 :], blocked)
        return [Work(s, s.num_computed_tokens, tokens) for s, tokens in given], tuple(started)

    def _is_turn_of_prompts(self) -> bool:
        """Whether this step may compute prompts, or decodes alone have it."""
        interval = self.rules.prefill_interval_steps
        if not self.rules.mixed_batches:
            interval = max(2, interval)
        return self._steps_without_prompts >= interval - 1
