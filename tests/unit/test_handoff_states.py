"""The life of a ticket is one table; both sides follow it."""

from __future__ import annotations

import pytest

from services.protocol.handoff import ARROWS, OPEN_STATES, HandoffState, IllegalMove, advance

S = HandoffState


def test_every_state_but_the_last_two_can_end_and_no_state_is_left_out() -> None:
    left = {a for a, _ in ARROWS}
    assert left == set(S) - {S.COMMITTED, S.FREE}
    assert {b for _, b in ARROWS} == set(S) - {S.REQUESTED}


def test_an_open_ticket_can_always_be_revoked_and_a_revoked_one_always_becomes_free() -> None:
    for state in OPEN_STATES:
        assert advance(state, S.REVOKED) == "revoked"
    assert advance(S.REVOKED, S.FREE) == "freed"
    assert advance(S.QUARANTINED, S.FREE) == "freed"


def test_a_quarantined_block_never_comes_back_but_through_the_fence() -> None:
    assert [b for a, b in ARROWS if a is S.QUARANTINED] == [S.FREE]


def test_every_move_that_the_table_lacks_is_an_error() -> None:
    for a in S:
        for b in S:
            if (a, b) not in ARROWS:
                with pytest.raises(IllegalMove, match=f"{a} to {b}"):
                    advance(a, b)
