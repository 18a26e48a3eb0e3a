"""What may still be done for a request whose attempt failed: a pure function, one rung below the other.

    resend (the writer's own) ─► retarget ─► retry | migrate ─► compute_here ─► fail

    resend        extents with a wrong digest go out once more
    retarget      the prefill worker keeps the KV and hands it to another decode worker
    retry         other workers, from the start: no token has come yet
    migrate       other workers get the prompt and every token that has come, and go on behind them
    compute_here  a mixed worker, or at last a decode worker, computes everything itself, so that no KV has to move
    fail          the request ends with its error

Each rung that is tried is counted and noted in the request's timeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.protocol.errors import ErrorCode


class Rung(StrEnum):
    RESEND = "resend"
    RETARGET = "retarget"
    RETRY = "retry"
    MIGRATE = "migrate"
    COMPUTE_HERE = "compute_here"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A failed attempt, and what the request has left."""

    code: ErrorCode
    is_retryable: bool
    attempts_left: int
    policy: str = "ladder"  # transfer.on_kv_failure
    can_retarget: bool = False  # the prefill worker lives and holds the KV
    was_retargeted: bool = False  # a transfer of the same KV failed before
    has_outputs: bool = False  # tokens have come, which must not be drawn again

    @property
    def is_kv_failure(self) -> bool:
        """KV that did not arrive, or arrived damaged; a lost worker is none."""
        return self.code is ErrorCode.TRANSFER_FAILED


def rungs(standing: Standing) -> tuple[Rung, ...]:
    """What to try, in order; a rung that finds nobody to carry it leaves the next one. Always ends with ``fail``.

    The last attempt after a failed transfer goes to a worker that needs none.
    """
    s = standing
    if not s.is_retryable or s.attempts_left < 1 or (s.is_kv_failure and s.policy == "fail"):
        return (Rung.FAIL,)
    once_is_enough = s.is_kv_failure and (s.policy == "recompute" or s.was_retargeted)
    found = [Rung.RETARGET] if s.can_retarget and not once_is_enough else []
    found.append(Rung.MIGRATE if s.has_outputs else Rung.RETRY)
    if s.is_kv_failure:
        found.insert(0 if s.attempts_left == 1 else len(found), Rung.COMPUTE_HERE)
    return (*found, Rung.FAIL)
