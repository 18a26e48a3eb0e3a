"""The sequences of an engine, their blocks and their queue: every change of state in one place, no decisions.

`services.engine.scheduler` decides what moves; this module moves it and keeps pool, queue and counts in agreement.
"""

from __future__ import annotations

import bisect
from operator import attrgetter

from kvstore.blocks import extend_name
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, SequenceOutput
from services.engine.sequence import Phase, Sequence
from services.protocol.errors import ErrorCode

_by_order = attrgetter("order")


class Roster:
    """Owns every sequence from `enroll` to its end, and its blocks."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.queue: list[Sequence] = []  # WAITING and RESERVING, by order
        self.num_reserved = 0
        self.held_blocks = 0
        self.queued_tokens = 0  # of the WAITING ones, prefix hits not foreseen
        self.preemptions = 0
        self.prompt_tokens_cached = 0
        self.bad_names = 0  # sequences whose names contradicted the pool's
        self._arrivals = 0

    def enroll(self, message: AddSequence, phase: Phase) -> None:
        """A checked sequence takes its place in the queue."""
        assert message.seq_id not in self.sequences
        seq = Sequence.of(message, self._arrivals, phase)
        self._arrivals += 1
        self.sequences[seq.seq_id] = seq
        self._enqueue(seq)

    def reusable_names(self, seq: Sequence) -> list[bytes]:
        """Of the blocks that a prefix hit may cover: never the last token of what is computed here, for its logits are
        needed; all of what a peer writes."""
        last = seq.num_given_tokens if seq.phase is Phase.RESERVING else seq.num_tokens - 1
        return seq.names[: last // self.limits.block_size]

    def fits(self, seq: Sequence) -> bool:
        """Whether the pool takes all blocks that the sequence brings and one to grow, if it ever will."""
        most = seq.num_tokens
        if not seq.hand_off:
            most = self.limits.most_tokens(seq.num_prompt_tokens, seq.num_tokens, seq.sampling.max_tokens)
        need = min(self.limits.blocks(seq.num_tokens) + 1, self.limits.blocks(most))
        return self.pool.can_acquire(need, self.reusable_names(seq))

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
        seq.num_known_tokens = max(seq.num_known_tokens, seq.num_computed_tokens)
        if not seq.was_placed:
            seq.was_placed = True
            seq.cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.prompt_tokens_cached += 0 if is_reserve else seq.cached_tokens  # the writer counts its own hits
        if is_reserve:
            seq.advance(Phase.RESERVED)
            self.num_reserved += 1
        else:
            seq.advance(Phase.RUNNING)
            self.running[seq.seq_id] = seq

    def begin(self, seq: Sequence) -> None:
        """The KV that a peer wrote for a RESERVED sequence is verified: it gets names, the sequence runs."""
        self.pool.activate(seq.seq_id)
        self.num_reserved -= 1
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
        if seq.phase in (Phase.WAITING, Phase.RESERVING):
            self._dequeue(seq)
            return
        self.held_blocks -= len(seq.block_ids) if seq.phase is Phase.HELD else 0
        self.num_reserved -= seq.phase is Phase.RESERVED
        self.running.pop(seq.seq_id, None)
        self.pool.release(seq.seq_id, quarantine=quarantine)

    def append(self, seq: Sequence, token_id: int) -> SequenceOutput:
        """The next token of a RUNNING sequence, which may end it; a hand-off is HELD from its first one on."""
        position = seq.num_outputs
        seq.token_ids.append(token_id)
        reason = self._finish_reason(seq, token_id)
        if seq.hand_off:
            self._hold(seq)
        elif reason:
            self.release(seq)
        return SequenceOutput(
            seq_id=seq.seq_id,
            position=position,
            token_ids=(token_id,),
            finish_reason=reason,
            cached_tokens=seq.cached_tokens,
        )

    def fail(self, seq: Sequence, message: str) -> SequenceOutput:
        """A RUNNING sequence ends with an error; its blocks are let go, but for an open hand-off, which is HELD."""
        position = seq.num_outputs
        if seq.hand_off:
            self._hold(seq)
        else:
            self.release(seq)
        return SequenceOutput(
            seq_id=seq.seq_id,
            position=position,
            token_ids=(),
            finish_reason="error",
            error_code=ErrorCode.INTERNAL.value,
            error=message,
            cached_tokens=seq.cached_tokens,
        )

    def name_blocks(self, seq: Sequence) -> None:
        """Name what has become full since the last call.

        Sequences without a root stay nameless, and so does the rest of one whose names do not follow one another: that
        is its sender's error, which must not reach others.
        """
        size = self.limits.block_size
        if not seq.root:
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
        assert self.queue == sorted(self.queue, key=_by_order)
        assert {s.seq_id for s in self.queue} == {
            s.seq_id for s in self.sequences.values() if s.phase in (Phase.WAITING, Phase.RESERVING)
        }
        assert self.queued_tokens == sum(s.num_tokens for s in self.queue if s.phase is Phase.WAITING)
        assert set(self.running) == {s.seq_id for s in self.sequences.values() if s.phase is Phase.RUNNING}
        held = sum(len(s.block_ids) for s in self.sequences.values() if s.phase is Phase.HELD)
        assert held == self.held_blocks
        assert self.num_reserved == sum(s.phase is Phase.RESERVED for s in self.sequences.values())
        for seq in self.sequences.values():
            assert bool(seq.block_ids) == (seq.phase not in (Phase.WAITING, Phase.RESERVING))
            assert not seq.block_ids or tuple(seq.block_ids) == self.pool.block_ids(seq.seq_id)
            assert seq.num_computed_tokens <= len(seq.block_ids) * self.limits.block_size

    def _hold(self, seq: Sequence) -> None:
        seq.advance(Phase.HELD)
        del self.running[seq.seq_id]
        self.held_blocks += len(seq.block_ids)

    def _finish_reason(self, seq: Sequence, token_id: int) -> str:
        if seq.num_outputs > seq.sampling.min_tokens and token_id in self.limits.end_tokens(seq.sampling):
            return "stop"
        if seq.num_outputs >= seq.sampling.max_tokens or seq.num_tokens >= self.limits.max_model_len:
            return "length"
        return ""

    def _enqueue(self, seq: Sequence) -> None:
        bisect.insort(self.queue, seq, key=_by_order)
        self.queued_tokens += seq.num_tokens if seq.phase is Phase.WAITING else 0

    def _dequeue(self, seq: Sequence) -> None:
        at = bisect.bisect_left(self.queue, seq.order, key=_by_order)
        assert self.queue[at] is seq
        del self.queue[at]
        self.queued_tokens -= seq.num_tokens if seq.phase is Phase.WAITING else 0
