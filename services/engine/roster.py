"""The sequences of an engine, their blocks and their queue: every change of state in one place, no decisions.

`services.engine.scheduler` decides what moves; this module moves it and keeps pool, queue and counts in agreement.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.blocks import extend_name
from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, SequenceOutput
from services.engine.policies import POLICIES, Sight
from services.engine.sequence import Phase, Sequence
from services.engine.waiting import Queue
from services.engine_config import DEFAULT_ENGINE, EngineConfig
from services.protocol.errors import ErrorCode


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
        self.num_reserving = 0
        self.num_reserved = 0  # choices of RESERVED sequences
        self.held_blocks = 0
        self.queued_tokens = 0  # of the WAITING ones, prefix hits not foreseen
        self.preemptions = 0
        self.prompt_tokens_cached = 0
        self.bad_names = 0  # sequences whose names contradicted the pool's
        self._arrivals = 0
        self._copies: list[tuple[int, int]] = []

    def enroll(self, message: AddSequence, phase: Phase) -> None:
        """A checked sequence takes its place in the queue."""
        assert message.seq_id not in self.sequences
        seq = Sequence.of(message, self._arrivals, phase, self.policy.rank(message.priority))
        self._arrivals += message.n
        self.sequences[seq.seq_id] = seq
        self.groups[seq.group_id] = dict.fromkeys(seq.choices, seq)
        seq.waits_since = self.clock
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
    def running_choices(self) -> int:
        """Sequences that run, each counted as often as it will be forked."""
        return sum(len(s.choices) for s in self.running.values())

    def is_alone(self, seq: Sequence) -> bool:
        """Whether no other sequence and no quarantine holds a block. The pool may still be full then: what it keeps of
        equal blocks for this one is let go when it is preempted."""
        others = any(s.block_ids for s in self.sequences.values() if s is not seq)
        return not others and not self.pool.counts().quarantined

    def place(self, seq: Sequence) -> None:
        """A queued sequence that `fits` gets its blocks: WAITING to RUNNING, RESERVING to RESERVED."""
        is_reserve = seq.phase is Phase.RESERVING
        got = self.pool.acquire(
            seq.seq_id, self.limits.blocks(seq.num_tokens), self.reusable_names(seq), reserved=is_reserve
        )
        self._dequeue(seq)
        seq.block_ids = list(got.block_ids)
        seq.num_named_blocks = got.cached_blocks
        seq.num_computed_tokens = got.cached_blocks * self.limits.block_size
        hits = max(0, min(seq.num_computed_tokens, seq.num_prompt_tokens) - seq.num_known_tokens)
        seq.cached_tokens += hits
        self.prompt_tokens_cached += 0 if is_reserve else hits  # the writer counts its own hits
        seq.num_known_tokens = max(seq.num_known_tokens, seq.num_computed_tokens)
        seq.was_placed = True
        if is_reserve:
            seq.advance(Phase.RESERVED)
            self.num_reserved += len(seq.choices)
        else:
            seq.advance(Phase.RUNNING)
            self.running[seq.seq_id] = seq

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
        self.pool.release(seq.seq_id)
        del self.running[seq.seq_id]
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

        A hand-off is HELD from its first one on.
        """
        reasons = {choice: self._finish_reason(seq, tokens[choice]) for choice in seq.choices}
        outputs = [self._output(seq, choice, tokens[choice], reason) for choice, reason in reasons.items()]
        if len(outputs) == 1 and not seq.hand_off and not outputs[0].finish_reason:
            seq.token_ids.append(outputs[0].token_ids[0])  # what nearly always happens
            return outputs
        going_on = [choice for choice, reason in reasons.items() if not reason]
        if seq.hand_off:
            seq.token_ids.append(tokens[seq.choice])
            self._hold(seq)
        elif not going_on:
            self.release(seq)
        else:
            self._split(seq, going_on, tokens)
        return outputs

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of blocks whose content must be copied before anything else is written, since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def fail(self, seq: Sequence, message: str) -> SequenceOutput:
        """A RUNNING sequence ends with an error; its blocks are let go, but for an open hand-off, which is HELD."""
        position = seq.num_outputs
        if seq.hand_off:
            self._hold(seq)
        else:
            self.release(seq)
        return SequenceOutput(
            seq_id=seq.group_id,
            position=position,
            token_ids=(),
            finish_reason="error",
            error_code=ErrorCode.INTERNAL.value,
            error=message,
            cached_tokens=seq.cached_tokens,
            choice=seq.choice,
        )

    def name_blocks(self, seq: Sequence) -> None:
        """Name what has become full since the last call.

        Sequences without a root stay nameless, and so does the rest of one whose names do not follow one another: that
        is its sender's error, which must not reach others.
        """
        size = self.limits.block_size
        if seq.num_computed_tokens // size <= seq.num_named_blocks or not seq.root or not self.pool.has_prefix_cache:
            return
        for i in range(seq.num_named_blocks, seq.num_computed_tokens // size):
            parent = seq.names[i - 1] if i else seq.root
            if i == len(seq.names):
                seq.names.append(extend_name(parent, seq.token_ids[i * size : (i + 1) * size]))
            try:
                self.pool.name_block(seq.seq_id, i, seq.names[i], parent)
            except ValueError:
                seq.root = b""
                self.bad_names += 1
                return
            seq.num_named_blocks = i + 1

    def check(self) -> None:
        """Raise AssertionError unless queue, counts and pool agree. For tests; walks everything."""
        self.pool.check()
        self.queue.check()
        assert self.num_reserving == sum(s.phase is Phase.RESERVING for s in self.queue)
        assert {s.seq_id for s in self.queue} == {
            s.seq_id for s in self.sequences.values() if s.phase in (Phase.WAITING, Phase.RESERVING)
        }
        assert self.queued_tokens == sum(s.num_tokens for s in self.queue if s.phase is Phase.WAITING)
        assert set(self.running) == {s.seq_id for s in self.sequences.values() if s.phase is Phase.RUNNING}
        held = sum(len(s.block_ids) for s in self.sequences.values() if s.phase is Phase.HELD)
        assert held == self.held_blocks
        reserved = [s for s in self.sequences.values() if s.phase is Phase.RESERVED]
        assert self.num_reserved == sum(len(s.choices) for s in reserved)
        members = {(s.group_id, choice, s.seq_id) for s in self.sequences.values() for choice in s.choices}
        assert members == {(g, choice, s.seq_id) for g, of in self.groups.items() for choice, s in of.items()}
        assert len({s.arrival for s in self.sequences.values()}) == len(self.sequences)
        for seq in self.sequences.values():
            assert bool(seq.block_ids) == (seq.phase not in (Phase.WAITING, Phase.RESERVING))
            assert not seq.block_ids or tuple(seq.block_ids) == self.pool.block_ids(seq.seq_id)
            assert seq.num_computed_tokens <= len(seq.block_ids) * self.limits.block_size

    def _hold(self, seq: Sequence) -> None:
        seq.advance(Phase.HELD)
        del self.running[seq.seq_id]
        self.held_blocks += len(seq.block_ids)

    @staticmethod
    def _output(seq: Sequence, choice: int, token_id: int, finish_reason: str) -> SequenceOutput:
        return SequenceOutput(
            seq_id=seq.group_id,
            position=seq.num_outputs,
            token_ids=(token_id,),
            finish_reason=finish_reason,
            cached_tokens=seq.cached_tokens,
            choice=choice,
        )

    def _finish_reason(self, seq: Sequence, token_id: int) -> str:
        """Why the sequence ends if this is its next token; empty where it goes on."""
        num_tokens, sampling = len(seq.token_ids), seq.sampling
        num_outputs = num_tokens - seq.num_prompt_tokens
        may_end = num_outputs >= sampling.min_tokens or sampling.grammar is not None
        if may_end and self.limits.ends(token_id, sampling):
            return "stop"
        if num_outputs + 1 >= sampling.max_tokens or num_tokens + 1 >= self.limits.max_model_len:
            return "length"
        return ""

    def _split(self, seq: Sequence, going_on: list[int], tokens: Mapping[int, int]) -> None:
        """Each choice that goes on gets a sequence of its own; the first one takes over this one."""
        for choice in seq.choices:
            if choice not in going_on:
                self._leave(seq, choice)
        for choice in going_on[1:]:
            self._fork(seq, choice, tokens[choice])
        seq.choices = (going_on[0],)
        seq.token_ids.append(tokens[going_on[0]])

    def _fork(self, seq: Sequence, choice: int, token_id: int) -> None:
        """One more sequence over the same full blocks, and with a copy of the tail. Where no block is left for that, it
        waits in the queue, finds the full blocks by their names and computes the tail again."""
        fork = seq.fork(choice)
        fork.token_ids.append(token_id)
        self.sequences[fork.seq_id] = self.groups[seq.group_id][choice] = fork
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
