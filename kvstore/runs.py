"""Free block ids, kept as runs of neighbours, so that a sequence's blocks lie together and move in few pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


def group_runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of each maximal run of neighbours among the ids, ascending. Ids must not repeat."""
    runs: list[tuple[int, int]] = []
    for block in sorted(ids):
        if runs and block == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


class FreeRuns:
    """A set of ids that gives out neighbours: best fit, else the longest runs first.

    Adding and taking a run cost a bisection over the distinct lengths (at most √(2·num_blocks) of them).
    """

    def __init__(self, num_blocks: int) -> None:
        self._end: dict[int, int] = {}  # first id -> one past the last
        self._first: dict[int, int] = {}  # one past the last -> first id
        self._by_length: dict[int, dict[int, None]] = {}  # length -> first ids, oldest first
        self._lengths: list[int] = []  # ascending, distinct
        self._count = num_blocks
        if num_blocks:
            self._insert(0, num_blocks)

    def __len__(self) -> int:
        return self._count

    def ids(self) -> set[int]:
        """A copy of the whole set."""
        return {block for first, end in self._end.items() for block in range(first, end)}

    def num_runs(self) -> int:
        return len(self._end)

    def run_at(self, first: int) -> int:
        """Length of the run that starts at this id; 0 where none does."""
        return self._end[first] - first if first in self._end else 0

    def fits(self, num_blocks: int, max_runs: int) -> bool:
        """Whether so many ids are here, in at most ``max_runs`` runs."""
        for length in reversed(self._lengths):
            if max_runs <= 0 or num_blocks <= 0:
                break
            count = min(max_runs, len(self._by_length[length]))
            max_runs -= count
            num_blocks -= count * length
        return num_blocks <= 0

    def add(self, ids: Iterable[int]) -> None:
        """Put ids back, none of which is in the set."""
        for first, count in group_runs(ids):
            end = first + count
            if first in self._first:
                before = self._first[first]
                self._remove(before)
                first = before
            if end in self._end:
                after = end
                end = self._end[after]
                self._remove(after)
            self._insert(first, end)
            self._count += count

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take ``num_blocks`` (at most ``len``) ids in as few runs as there are, ascending.

        A run that starts right behind ``after`` and is long enough wins, so that a sequence grows in place.
        """
        assert 0 <= num_blocks <= self._count, f"{num_blocks} of {self._count} free blocks"
        taken: list[int] = []
        if after is not None and self.run_at(after + 1) >= num_blocks > 0:
            return self._cut(after + 1, num_blocks)
        while (missing := num_blocks - len(taken)) > 0:
            fit = bisect_left(self._lengths, missing)
            length = self._lengths[fit] if fit < len(self._lengths) else self._lengths[-1]
            taken += self._cut(next(iter(self._by_length[length])), min(length, missing))
        return sorted(taken)

    def _cut(self, first: int, count: int) -> list[int]:
        end = self._remove(first)
        if first + count < end:
            self._insert(first + count, end)
        self._count -= count
        return list(range(first, first + count))

    def _insert(self, first: int, end: int) -> None:
        self._end[first] = end
        self._first[end] = first
        length = end - first
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._lengths, length)
        self._by_length[length][first] = None

    def _remove(self, first: int) -> int:
        end = self._end.pop(first)
        del self._first[end]
        length = end - first
        del self._by_length[length][first]
        if not self._by_length[length]:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return end
