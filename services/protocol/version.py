"""The version of what crosses between pdray's own processes (worker.proto), and who understands whom.

A version changes when an old process would misread a message, not when it only lacks a new field: those it ignores.
A process reads its own version and the one before, and speaks to a peer in the older version of the two. So peers at
most one apart work together, in either direction, and an upgrade goes one version at a time, in any order of processes.

    0   before versions were told
    1   told in every Fingerprint and RouterMessage

What lies in Redis has versions of its own (`kvstore.index.payload`), and so has a prepared model (`CARD_VERSION`).
"""

from __future__ import annotations

PROTOCOL_VERSION = 1


def apart(theirs: int, ours: int, they: str, we: str) -> str:
    """Why two versions do not understand each other, naming both sides and versions; "" where they do."""
    if abs(theirs - ours) <= 1:
        return ""
    return (
        f"protocol version differs by more than one: {theirs} on {they}, {ours} on {we}; "
        f"upgrade one version of pdray at a time"
    )
