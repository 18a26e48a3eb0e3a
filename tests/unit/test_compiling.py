"""A grammar whose compilation breaks ends its own sequence; the engine and the others go on."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from services.engine.compiling import Compiling
from services.engine.grammar import Compiled, Grammars
from services.engine.messages import AddSequence, Sampling
from services.protocol.errors import ErrorCode, invalid
from services.protocol.grammar import GrammarSpec


class Scripted(Grammars):
    """Futures of its own instead of threads."""

    def __init__(self) -> None:
        self.futures: list[Future[Compiled]] = []

    def compile(self, spec: GrammarSpec) -> Future[Compiled]:
        self.futures.append(Future())
        return self.futures[-1]


def sequence(seq_id: str) -> AddSequence:
    sampling = Sampling(grammar=GrammarSpec(kind="regex", text="a+"))
    return AddSequence(seq_id=seq_id, prompt_ids=(1,), sampling=sampling, root=b"")


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (invalid("no"), ErrorCode.INVALID_REQUEST),
        (MemoryError(), ErrorCode.INTERNAL),
        (KeyError("x"), ErrorCode.INTERNAL),
    ],
)
def test_whatever_breaks_ends_one_sequence(broken: Exception, code: ErrorCode) -> None:
    grammars = Scripted()
    compiling = Compiling(grammars)
    assert all(compiling.hold(sequence(name), 0.0) for name in ("a", "b", "c"))
    grammars.futures[1].set_exception(broken)
    ((held, error),) = compiling.take()
    assert error is not None
    assert (held.seq_id, error.code) == ("b", code)
    assert len(compiling) == 2
