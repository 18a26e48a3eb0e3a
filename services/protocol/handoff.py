"""The life of a ticket, the same table for the writer (prefill) and the reader (decode).

    REQUESTED ──granted──► GRANTED ──receiving──► RECEIVING ──verifying──► VERIFYING ──committed──► COMMITTED
        │                     │                    │     ▲──resending──────────┤
        └──────revoked────────┴───────revoked──────┴────────────revoked────────┘
                                     │
                                 REVOKED ──quarantined──► QUARANTINED ──freed──► FREE
                                     └──────────────freed (nothing was on the wire)──┘

    state        the writer                               the reader
    REQUESTED    asked the reader for blocks              waits for free blocks
    GRANTED      knows the reader's blocks                holds blocks, opens its memory to the writer
    RECEIVING    pushes layers                            bytes may land
    VERIFYING    sent the digests                         hashes what landed
    COMMITTED    lets its blocks go                       an ordinary sequence: WAITING, RUNNING, FINISHED
    REVOKED      the attempt is over                      the attempt is over
    QUARANTINED  a write may still read the blocks        a write may still land in the blocks
    FREE         fenced: blocks may be reused             fenced: blocks may be reused

Every arrow is one call of `advance`, one event of the request's timeline and one count of a metric, under one name.
"""

from __future__ import annotations

from enum import StrEnum


class HandoffState(StrEnum):
    REQUESTED = "requested"
    GRANTED = "granted"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    COMMITTED = "committed"
    REVOKED = "revoked"
    QUARANTINED = "quarantined"
    FREE = "free"


_S = HandoffState
ARROWS: dict[tuple[HandoffState, HandoffState], str] = {
    (_S.REQUESTED, _S.GRANTED): "granted",
    (_S.GRANTED, _S.RECEIVING): "receiving",
    (_S.RECEIVING, _S.VERIFYING): "verifying",
    (_S.VERIFYING, _S.RECEIVING): "resending",
    (_S.VERIFYING, _S.COMMITTED): "committed",
    (_S.REQUESTED, _S.REVOKED): "revoked",
    (_S.GRANTED, _S.REVOKED): "revoked",
    (_S.RECEIVING, _S.REVOKED): "revoked",
    (_S.VERIFYING, _S.REVOKED): "revoked",
    (_S.REVOKED, _S.QUARANTINED): "quarantined",
    (_S.REVOKED, _S.FREE): "freed",
    (_S.QUARANTINED, _S.FREE): "freed",
}
OPEN_STATES = frozenset({_S.REQUESTED, _S.GRANTED, _S.RECEIVING, _S.VERIFYING})


class IllegalMove(AssertionError):
    """Our own invariant broke: a ticket was moved along an arrow that the table does not have."""


def advance(current: HandoffState, to: HandoffState) -> str:
    """Name of the arrow from ``current`` to ``to``. Raises IllegalMove where there is none."""
    try:
        return ARROWS[(current, to)]
    except KeyError:
        raise IllegalMove(f"a ticket cannot go from {current} to {to}") from None
