"""Blocks of a sequence that wait for a fence; a sequence may wait for several, of a pull and of a push."""

from __future__ import annotations

from collections import Counter

from services.engine import messages as m
from services.worker.core import WorkerCore


class Quarantines:
    """The engine knows a quarantine by its sequence, so it is told of the end of the last one."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._waits: Counter[str] = Counter()

    def hold(self, seq_id: str) -> None:
        """A message with ``quarantine`` goes to the engine."""
        self._waits[seq_id] += 1

    def free(self, seq_id: str) -> None:
        """One of the fences that the sequence waits for is there."""
        self._waits[seq_id] -= 1
        if self._waits[seq_id] <= 0:
            del self._waits[seq_id]
            self._core.send_engine(m.Unquarantine(seq_id=seq_id))
