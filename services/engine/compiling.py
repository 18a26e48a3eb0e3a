"""Sequences whose grammar is still being compiled, in a thread: they are not in the scheduler yet.

hold ──compiled──► take ─► the scheduler
  └──refused─────► take, with the error ─► the sequence ends with it, before anything was computed
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from services.engine.grammar import Compiled, Grammars
from services.engine.messages import AddSequence, ReserveSequence
from services.protocol.errors import ErrorCode, RequestError

log = logging.getLogger("pdray.engine")

POLL_S = 0.002
"""How long the step loop may sleep while something is being compiled."""


@dataclass(frozen=True, slots=True)
class Held:
    message: AddSequence | ReserveSequence
    accepted_s: float
    future: Future[Compiled]

    @property
    def seq_id(self) -> str:
        return sequence_of(self.message).seq_id


def sequence_of(message: AddSequence | ReserveSequence) -> AddSequence:
    """The sequence that a message brings."""
    return message.sequence if isinstance(message, ReserveSequence) else message


class Compiling:
    """In the order in which they came; who is ready overtakes who is not."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: AddSequence | ReserveSequence, now_s: float) -> bool:
        """Keep a sequence that has a grammar, until `take` gives it back; False for any other."""
        spec = sequence_of(message).sampling.grammar
        if spec is None or self._grammars is None:
            return False
        self._held.append(Held(message, now_s, self._grammars.compile(spec)))
        return True

    def drop(self, seq_id: str) -> bool:
        """Forget one that is not wanted any more; False where it is not held."""
        kept = [h for h in self._held if h.seq_id != seq_id]
        found = len(kept) < len(self._held)
        self._held = kept
        return found

    def take(self) -> Iterator[tuple[Held, RequestError | None]]:
        """Those whose grammar is compiled, or refused with this error."""
        done = [h for h in self._held if h.future.done()]
        if done:
            self._held = [h for h in self._held if not h.future.done()]
        for held in done:
            error = held.future.exception()
            if error is not None and not isinstance(error, RequestError):
                log.error("compiling the grammar of %s failed", held.seq_id, exc_info=error)
                error = RequestError(ErrorCode.INTERNAL, f"compiling the grammar failed: {type(error).__name__}")
            yield held, error
