"""The sequences of an engine, their blocks and their queue: every change of state in one place, no decisions.

`services.engine.scheduler` decides what moves; this module moves it and keeps pool, queue and counts in agreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.engine.books import check_roster
from services.engine.ends import failure_of, finish_reason, output_of
from services.engine.intake import Limits
from services.engine.messages import AddSequence, SequenceOutput
from services.engine.naming import name_ahead, name_computed
from services.engine.policies import POLICIES, Sight
from services.engine.sequence import Phase, Sequence
from services.engine.waiting import Queue
from services.engine_config import DEFAULT_ENGINE, EngineConfig

DEVICE = "device"
"""Source of what is in the block pool itself."""


class Roster:
    """Owns every sequence from `enroll` to its end, and its blocks."""

    def __init__(self, pool: BlockPool, limits: Limits, rules: EngineConfig = DEFAULT_ENGINE) -> None:
        self.pool = pool
        self.limits = limits
        self.policy = POLICIES[rules.policy]
        self.sequences: dict[str, Sequence] = {}
        self.groups: dict[str, dict[int, Sequence]] = {}  # group id -> choice -> its sequence; several may share one
        self.running: dict[str, Sequence] = {}
        line = self.policy.line(Sight(count_hits=self.count_hit_tokens, lpm_queue_bound=rules.lpm_queue_bound))
        self.queue = Queue(line, rules.ageing_bound_tokens, ranks_preempted=self.policy.ranks_started)
        self.ageing_bound = rules.ageing_bound_tokens
        self.clock = 0  # tokens computed so far
        self.loading: dict[str, Sequence] = {}
        self.num_reserving = 0
        self.num_reserved = 0  # choices of RESERVED sequences
        self.held_blocks = 0
        self.queued_tokens = 0  # of the WAITING ones, prefix hits not foreseen
        self.preemptions = 0
        self.cached_by_source: Counter[str] = Counter()  # prompt tokens found, by where their KV was
        self.bad_names = 0  # sequences whose names contradicted the pool's
        self._arrivals = 0
        self._copies: list[tuple[int, int]] = []
        self._loads: list[Sequence] = []

    def enroll(self, message: AddSequence, phase: Phase) -> None:
        """A checked sequence takes its place in the queue."""
        assert message.seq_id not in self.sequences
        seq = Sequence.of(message, self._arrivals, phase, self.policy.rank(message.priority))
        self._arrivals += message.n
        self.sequences[seq.seq_id] = seq
        self.groups[seq.group_id] = dict.fromkeys(seq.choices, seq)
        seq.waits_since = self.clock
        if message.output_ids or message.outputs:
            name_ahead(seq, self.limits.block_size)
        self._enqueue(seq)

    def age(self) -> None:
        """Mark those that have waited for the ageing bound, in the queue or for their next token."""
        self.queue.age(self.clock)
        for seq in self.running.values():
            if not seq.is_aged and self.clock - seq.waits_since >= self.ageing_bound:
                seq.age()

    def reusable_names(self, seq: Sequence) -> list[bytes]:
        """Of the blocks that a prefix hit may cover: never the last token of what is computed here, for its logits are
        needed; all of what a peer writes."""
        return seq.names[: self._num_reusable(seq)]

    def count_hits(self, seq: Sequence) -> int:
        """Blocks of a queued sequence that are here already."""
        most = min(len(seq.names), self._num_reusable(seq))
        seq.num_hit_blocks = self.pool.lookup(seq.names, most, seq.num_hit_blocks)
        return seq.num_hit_blocks

    def _num_reusable(self, seq: Sequence) -> int:
        if not self.pool.has_prefix_cache or (seq.sampling.prompt_logprobs >= 0 and seq.phase is not Phase.RESERVING):
            return 0  # the logits of the whole prompt are needed, or nothing is kept
        last = seq.num_given_tokens if seq.phase is Phase.RESERVING else seq.num_tokens - 1
        return last // self.limits.block_size

    def count_hit_tokens(self, seq: Sequence) -> int:
        return self.count_hits(seq) * self.limits.block_size

    @property
    def prompt_tokens_cached(self) -> int:
        return sum(self.cached_by_source.values())

    @property
    def running_choices(self) -> int:
        """Sequences that run, each counted as often as it will be forked."""
        return sum(len(s.choices) for s in self.running.values())

    def is_alone(self, seq: Sequence) -> bool:
        """Whether no other sequence and no quarantine holds a block. The pool may still be full then: what it keeps of
        equal blocks for this one is let go when it is preempted."""
        others = any(s.block_ids for s in self.sequences.values() if s is not seq)
        return not others and not self.pool.counts().quarantined

    def count_loadable(self, seq: Sequence) -> int:
        """Blocks of a queued prompt that a source offers beyond those that are here."""
        if not seq.offered_blocks or seq.phase is not Phase.WAITING:
            return 0
        return max(0, min(seq.offered_blocks, len(seq.names), self._num_reusable(seq)) - self.count_hits(seq))

    def place(self, seq: Sequence) -> None:
        """A queued sequence that `fits` gets its blocks: WAITING to RUNNING or LOADING, RESERVING to RESERVED."""
        is_reserve = seq.phase is Phase.RESERVING
        loads = self.count_loadable(seq)
        names, num_blocks = self.reusable_names(seq), self.limits.blocks(seq.num_tokens)
        got = self.pool.acquire(seq.seq_id, num_blocks, names, reserved=is_reserve or loads > 0)
        self._dequeue(seq)
        seq.block_ids = list(got.block_ids)
        seq.num_named_blocks = got.cached_blocks
        self._found(seq, got.cached_blocks, "" if is_reserve else DEVICE)  # the writer counts its own hits
        seq.was_placed = True
        if is_reserve:
            seq.advance(Phase.RESERVED)
            self.num_reserved += len(seq.choices)
        elif loads:
            seq.load_blocks = loads
            seq.advance(Phase.LOADING)
            self.loading[seq.seq_id] = seq
            self._loads.append(seq)
        else:
            seq.advance(Phase.RUNNING)
            self.running[seq.seq_id] = seq

    def take_loads(self) -> tuple[Sequence, ...]:
        """Sequences that became LOADING since the last call."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def loaded(self, seq: Sequence, num_blocks: int, source: str) -> None:
        """LOADING to RUNNING: the first ``num_blocks`` of those it waited for hold their KV, and are named at once."""
        self._end_load(seq)
        self.pool.activate(seq.seq_id)
        self._found(seq, seq.num_named_blocks + num_blocks, source)
        seq.advance(Phase.RUNNING)
        self.running[seq.seq_id] = seq
        self.name_blocks(seq)

    def unload(self, seq: Sequence) -> None:
        """LOADING to WAITING, since a write may still land in its blocks: they are quarantined, it gets others."""
        self._end_load(seq)
        self._requeue(seq, quarantine=True)

    def begin(self, seq: Sequence) -> None:
        """The KV that a peer wrote for a RESERVED sequence is verified: it gets names, the sequence runs."""
        self.pool.activate(seq.seq_id)
        self.num_reserved -= len(seq.choices)
        seq.num_computed_tokens = seq.num_known_tokens = seq.num_given_tokens
        seq.advance(Phase.RUNNING)
        self.running[seq.seq_id] = seq
        self.name_blocks(seq)

    def preempt(self, seq: Sequence) -> None:
        """A RUNNING sequence loses its blocks and queues where its order says; named ones stay in the prefix cache."""
        self.preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence, *, quarantine: bool = False) -> None:
        self.pool.release(seq.seq_id, quarantine=quarantine)
        self.running.pop(seq.seq_id, None)
        seq.block_ids = []
        seq.num_computed_tokens = seq.num_named_blocks = 0
        seq.advance(Phase.WAITING)
        self._enqueue(seq)

    def release(self, seq: Sequence, *, quarantine: bool = False) -> None:
        """Forget a sequence in any state and let its blocks go."""
        del self.sequences[seq.seq_id]
        for choice in seq.choices:
            self._leave(seq, choice)
        if seq.phase in (Phase.WAITING, Phase.RESERVING):
            self._dequeue(seq)
            return
        self.held_blocks -= len(seq.block_ids) if seq.phase is Phase.HELD else 0
        self.num_reserved -= len(seq.choices) if seq.phase is Phase.RESERVED else 0
        self.running.pop(seq.seq_id, None)
        self.loading.pop(seq.seq_id, None)
        self.pool.release(seq.seq_id, quarantine=quarantine)

    def drop(self, seq: Sequence, choice: int) -> None:
        """One choice is over, in any state; the others of the same sequence go on. A hand-off HELD keeps all."""
        if seq.phase is Phase.HELD:
            return
        if len(seq.choices) == 1:
            self.release(seq)
            return
        seq.choices = tuple(c for c in seq.choices if c != choice)
        self.num_reserved -= seq.phase is Phase.RESERVED
        self._leave(seq, choice)

    def append(self, seq: Sequence, tokens: Mapping[int, int]) -> list[SequenceOutput]:
        """The next token of each choice of a RUNNING sequence, which may end it; those that go on share its blocks.

        A hand-off is HELD from its first one on. Outputs that choices brought along take the place of what was drawn.
        """
        brought = seq.take_parting(tokens) if seq.parting else {}
        tokens = {choice: ids[0] for choice, ids in brought.items()} or tokens
        reasons = {choice: finish_reason(seq, tokens[choice], self.limits) for choice in seq.choices}
        outputs = [output_of(seq, choice, tokens[choice], reason) for choice, reason in reasons.items()]
        if len(outputs) == 1 and not (brought or seq.hand_off or outputs[0].finish_reason):
            seq.token_ids.append(outputs[0].token_ids[0])  # what nearly always happens
            return outputs
        going_on = [choice for choice, reason in reasons.items() if not reason]
        if seq.hand_off:
            seq.token_ids.append(tokens[seq.choice])
            self._hold(seq)
        elif not going_on:
            self.release(seq)
        else:
            self._split(seq, {choice: brought.get(choice, (tokens[choice],)) for choice in going_on})
        return outputs

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of blocks whose content must be copied before anything else is written, since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def fail(self, seq: Sequence, message: str) -> SequenceOutput:
        """A RUNNING sequence ends with an error; its blocks are let go, but for an open hand-off, which is HELD."""
        if seq.hand_off:
            self._hold(seq)
        else:
            self.release(seq)
        return failure_of(seq, message)

    def name_blocks(self, seq: Sequence) -> None:
        """Name what has become full since the last call."""
        self.bad_names += not name_computed(seq, self.limits.block_size, self.pool)

    def check(self) -> None:
        """See `services.engine.books.check_roster`."""
        check_roster(self)

    def _found(self, seq: Sequence, num_blocks: int, source: str) -> None:
        """So many leading blocks hold their KV; what of them is news counts as cached, for ``source`` unless empty."""
        seq.num_computed_tokens = num_blocks * self.limits.block_size
        hits = max(0, min(seq.num_computed_tokens, seq.num_prompt_tokens) - seq.num_known_tokens)
        seq.cached_tokens += hits
        if source:
            self.cached_by_source[source] += hits
        seq.num_known_tokens = max(seq.num_known_tokens, seq.num_computed_tokens)

    def _end_load(self, seq: Sequence) -> None:
        del self.loading[seq.seq_id]
        seq.load_blocks = seq.offered_blocks = 0

    def _hold(self, seq: Sequence) -> None:
        seq.advance(Phase.HELD)
        del self.running[seq.seq_id]
        self.held_blocks += len(seq.block_ids)

    def _split(self, seq: Sequence, going_on: Mapping[int, tuple[int, ...]]) -> None:
        """Each choice that goes on gets a sequence of its own, and its next tokens; the first one takes over this one.
        With more than one token it waits in the queue, finds the full blocks by their names and computes the rest."""
        for choice in seq.choices:
            if choice not in going_on:
                self._leave(seq, choice)
        first, *others = going_on
        for choice in others:
            self._fork(seq, choice, going_on[choice])
        seq.choices = (first,)
        self._give(seq, going_on[first])
        if len(going_on[first]) > 1:
            self._requeue(seq)

    def _give(self, seq: Sequence, token_ids: tuple[int, ...]) -> None:
        seq.token_ids += token_ids
        if len(token_ids) > 1:
            seq.num_given_tokens = len(seq.token_ids)
            name_ahead(seq, self.limits.block_size)

    def _fork(self, seq: Sequence, choice: int, token_ids: tuple[int, ...]) -> None:
        """One more sequence over the same full blocks, and with a copy of the tail. Where no block is left for that, it
        waits in the queue, finds the full blocks by their names and computes the tail again."""
        fork = seq.fork(choice)
        self._give(fork, token_ids)
        self.sequences[fork.seq_id] = self.groups[seq.group_id][choice] = fork
        if len(token_ids) > 1:
            self._enqueue(fork)
            return
        num_shared = seq.num_computed_tokens // self.limits.block_size
        tail = seq.block_ids[num_shared:]
        try:
            fork.block_ids = list(self.pool.fork(seq.seq_id, fork.seq_id, num_shared, len(tail)))
        except OutOfBlocks:
            self._enqueue(fork)
            return
        self._copies += zip(tail, fork.block_ids[num_shared:], strict=True)
        fork.num_computed_tokens = seq.num_computed_tokens
        fork.num_named_blocks = seq.num_named_blocks
        fork.advance(Phase.RUNNING)
        self.running[fork.seq_id] = fork

    def _leave(self, seq: Sequence, choice: int) -> None:
        group = self.groups[seq.group_id]
        del group[choice]
        if not group:
            del self.groups[seq.group_id]

    def _enqueue(self, seq: Sequence) -> None:
        self.queue.add(seq)
        self.queued_tokens += seq.num_tokens if seq.phase is Phase.WAITING else 0
        self.num_reserving += seq.phase is Phase.RESERVING

    def _dequeue(self, seq: Sequence) -> None:
        self.queue.remove(seq)
        self.queued_tokens -= seq.num_tokens if seq.phase is Phase.WAITING else 0
        self.num_reserving -= seq.phase is Phase.RESERVING
