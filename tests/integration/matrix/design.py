"""What the design says of each cell: who may end with an error, and which rung of the ladder serves."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.matrix.experiment import FAULTS, STOP_S, Fault
from tests.integration.matrix.phases import PHASES

LONG_STOP_S = 60.0
CUT_S = STOP_S
ONE, TWO = 1, 2

ALL_FAULTS = [
    Fault(kind, side, pairs, {"stop": STOP_S, "cut": CUT_S}.get(kind, 0.0))
    for pairs in (ONE, TWO)
    for kind in FAULTS
    for side in ("P", "D")
]
LONG = {Fault("stop", "P", TWO, LONG_STOP_S): "transfer", Fault("stop", "D", TWO, LONG_STOP_S): "decoding"}
CELLS = [(fault, phase) for fault in ALL_FAULTS for phase in PHASES] + list(LONG.items())
QUICK = (
    Fault("kill", "P", TWO),
    Fault("kill", "D", TWO),
    Fault("stop", "D", TWO, STOP_S),
    Fault("cut", "P", TWO, CUT_S),
    Fault("restart", "P", TWO),
    Fault("restart", "D", TWO),
)
"""Run by `make test` too, more than a third of all cells: each worker, each fault, each phase; in one world, since
bringing one up takes long."""


@dataclass(frozen=True, slots=True)
class Expected:
    rungs: tuple[str, ...]  # of a request that is served; "none" where its first attempt serves
    may_fail: bool  # with a 5xx, within the budget


_TWO_PAIRS = {
    "P": {"queued": "retry", "prefill": "retry", "transfer": "migrate", "committed": "none", "decoding": "none"},
    "D": {
        "queued": "retarget",
        "prefill": "retarget",
        "transfer": "retarget",
        "committed": "migrate",
        "decoding": "migrate",
    },
}
_AGAIN = ("retry", "retarget", "migrate", "compute_here")


def expected(fault: Fault, phase: str) -> Expected:
    """With one pair a worker that comes back in time may still serve; else there is nobody left who could."""
    rung = _TWO_PAIRS[fault.side][phase]
    if fault.pairs == TWO or rung == "none":
        return Expected((rung,), may_fail=False)
    return Expected(_AGAIN, may_fail=True)
