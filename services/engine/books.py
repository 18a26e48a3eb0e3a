"""Whether an engine's books agree: queue, phases, counts and block pool. For tests; it walks everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from services.engine.roster import Roster


def check_roster(roster: Roster) -> None:
    """Raise AssertionError unless all of it agrees."""
    roster.pool.check()
    roster.queue.check()
    sequences = list(roster.sequences.values())
    waiting = {s.seq_id for s in sequences if s.phase in (Phase.WAITING, Phase.RESERVING)}
    assert {s.seq_id for s in roster.queue} == waiting
    assert roster.num_reserving == sum(s.phase is Phase.RESERVING for s in roster.queue)
    assert roster.queued_tokens == sum(s.num_tokens for s in roster.queue if s.phase is Phase.WAITING)
    assert set(roster.running) == {s.seq_id for s in sequences if s.phase is Phase.RUNNING}
    assert set(roster.loading) == {s.seq_id for s in sequences if s.phase is Phase.LOADING}
    assert roster.held_blocks == sum(len(s.block_ids) for s in sequences if s.phase is Phase.HELD)
    assert roster.num_reserved == sum(len(s.choices) for s in sequences if s.phase is Phase.RESERVED)
    members = {(s.group_id, choice, s.seq_id) for s in sequences for choice in s.choices}
    assert members == {(g, choice, s.seq_id) for g, of in roster.groups.items() for choice, s in of.items()}
    assert len({s.arrival for s in sequences}) == len(sequences)
    for seq in sequences:
        _check_blocks(roster, seq)


def _check_blocks(roster: Roster, seq: Sequence) -> None:
    size = roster.limits.block_size
    assert bool(seq.block_ids) == (seq.phase not in (Phase.WAITING, Phase.RESERVING))
    assert not seq.block_ids or tuple(seq.block_ids) == roster.pool.block_ids(seq.seq_id)
    assert seq.num_computed_tokens <= len(seq.block_ids) * size
    assert bool(seq.load_blocks) == (seq.phase is Phase.LOADING)
    if seq.phase is Phase.LOADING:
        assert seq.num_computed_tokens == seq.num_named_blocks * size
        assert (seq.num_named_blocks + seq.load_blocks) * size < seq.num_tokens  # the last token is computed
