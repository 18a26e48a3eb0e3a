"""The queue: sequences that wait, in the order in which a policy looks at them.

    add ──► body, a line in the policy's order ──┬─ waited for the ageing bound ─► front ──► remove
      └──── preempted, where the policy cannot rank it ────────────────────────► ▲

The front goes first, by `Sequence.order`: aged ones as they arrived, then preempted ones. Time is counted in computed
tokens, which the caller tells. Asking for the first few of a thousand costs little; nothing sorts the whole queue at
each step.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Protocol

from services.engine.sequence import Sequence

_RECOUNTED = 128
"""Sequences whose cached prefix is looked up again when a line is asked for its first."""
_by_order = attrgetter("order")


class Line(Protocol):
    """Waiting sequences in some order."""

    def add(self, seq: Sequence) -> None: ...
    def remove(self, seq: Sequence) -> None: ...
    def first(self, count: int, clock: int) -> list[Sequence]:
        """The first ``count``. ``clock``: tokens computed so far."""
        ...


class SortedLine:
    """By a key that does not change while a sequence waits, and that no two share."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._keys: list[Any] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, seq: Sequence) -> None:
        key = self._key(seq)
        at = bisect.bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._sequences.insert(at, seq)

    def remove(self, seq: Sequence) -> None:
        at = bisect.bisect_left(self._keys, self._key(seq))
        assert self._sequences[at] is seq
        del self._keys[at], self._sequences[at]

    def first(self, count: int, clock: int) -> list[Sequence]:
        return self._sequences[:count]


class HitsLine:
    """By tokens found in the prefix cache, most first, then by arrival; with more than ``bound``, by arrival alone."""

    def __init__(self, count_hits: Callable[[Sequence], int], bound: int) -> None:
        self._count_hits = count_hits
        self._bound = bound
        self._arrived = SortedLine(attrgetter("arrival"))

    def add(self, seq: Sequence) -> None:
        self._arrived.add(seq)

    def remove(self, seq: Sequence) -> None:
        self._arrived.remove(seq)

    def first(self, count: int, clock: int) -> list[Sequence]:
        if len(self._arrived) > self._bound:
            return self._arrived.first(count, clock)
        return sorted(self._arrived.first(self._bound, clock), key=self._count_hits, reverse=True)[:count]


class RatioLine:
    """By tokens computed since arrival for each token of its own to compute, most first, then by arrival.

    The cached prefix of up to 128 is looked up anew each time, in turn; of the others the last known one counts.
    """

    def __init__(self, count_uncached: Callable[[Sequence], int]) -> None:
        self._count_uncached = count_uncached
        self._uncached: dict[str, tuple[int, int, int, Sequence]] = {}  # (arrived, tokens, arrival, sequence)

    def add(self, seq: Sequence) -> None:
        self._uncached[seq.seq_id] = (seq.waits_since, self._count_uncached(seq), seq.arrival, seq)

    def remove(self, seq: Sequence) -> None:
        del self._uncached[seq.seq_id]

    def first(self, count: int, clock: int) -> list[Sequence]:
        for seq in [entry[3] for entry, _ in zip(self._uncached.values(), range(_RECOUNTED), strict=False)]:
            self.remove(seq)
            self.add(seq)
        ratios = [((since - clock) / tokens, nth, seq) for since, tokens, nth, seq in self._uncached.values()]
        return [seq for _, _, seq in heapq.nsmallest(count, ratios)]


class Queue:
    """All that wait. ``ranks_preempted``: the body's order holds for preempted sequences too."""

    def __init__(self, body: Line, ageing_bound: int, *, ranks_preempted: bool) -> None:
        self._body = body
        self._front = SortedLine(_by_order)
        self._ageing_bound = ageing_bound
        self._ranks_preempted = ranks_preempted
        self._line_of: dict[str, tuple[Line, Sequence]] = {}
        self._ages: list[tuple[int, int, Sequence]] = []  # heap of (since, arrival, sequence); may hold ones that left

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return iter([seq for _, seq in self._line_of.values()])

    def add(self, seq: Sequence) -> None:
        goes_first = seq.is_aged or (seq.was_placed and not self._ranks_preempted)
        line = self._front if goes_first else self._body
        line.add(seq)
        self._line_of[seq.seq_id] = line, seq
        if not seq.is_aged:
            heapq.heappush(self._ages, (seq.waits_since, seq.arrival, seq))

    def remove(self, seq: Sequence) -> None:
        line, _ = self._line_of.pop(seq.seq_id)
        line.remove(seq)

    def first(self, count: int, clock: int) -> list[Sequence]:
        found = self._front.first(count, clock)
        if len(found) < min(count, len(self)):
            found = found + self._body.first(count - len(found), clock)
        return found

    def age(self, clock: int) -> None:
        """Move those that have waited for the bound to the front."""
        while self._ages and clock - self._ages[0][0] >= self._ageing_bound:
            since, _, seq = heapq.heappop(self._ages)
            entry = self._line_of.get(seq.seq_id)
            if entry is not None and entry[1] is seq and seq.waits_since == since and not seq.is_aged:
                self.remove(seq)
                seq.age()
                self.add(seq)

    def check(self) -> None:
        """Raise AssertionError unless every sequence is in its line once, and those that go first do. For tests."""
        found = self.first(len(self), 0)
        assert {id(s) for s in found} == {id(s) for s in self}
        assert len(found) == len(self)
        first = [s for s in found if s.is_aged or (s.was_placed and not self._ranks_preempted)]
        assert found[: len(first)] == first == sorted(first, key=_by_order)
