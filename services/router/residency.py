"""Which blocks one worker holds, as far as the router knows: what its events say, and what was routed there just now.

Both sets are prefix-closed (a block is there only with everything before it), so the depth of a prompt is found by
bisection. A wrong entry costs a hit, never a wrong answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

SPECULATIVE_S = 5.0
"""How long a routed prompt counts as cached without an event that says so."""
MAX_SPECULATIVE = 1 << 18
"""Names expected at once; the oldest are forgotten first."""


class Residency:
    """Blocks of one worker epoch. ``max_names`` bounds what a feed can make the router keep."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._names: set[bytes] = set()
        self._expected: dict[bytes, float] = {}  # name -> expires at; never younger than a name of a longer prompt
        self._order: deque[tuple[float, bytes]] = deque()
        self.seq = -1  # number of the last batch applied; -1 before the first snapshot

    def __len__(self) -> int:
        return len(self._names)

    def reset(self, seq: int, names: Iterable[bytes]) -> bool:
        """Replace everything known by a snapshot. True where that changed what was thought to be there."""
        fresh = set(names)
        if len(fresh) > self._max_names:
            fresh = set()
        changed = fresh != self._names
        self._names, self.seq = fresh, seq
        for name in fresh:
            self._expected.pop(name, None)
        return changed

    def apply(self, seq: int, stored: Sequence[bytes], removed: Sequence[bytes], cleared: bool = False) -> bool:
        """Take one batch of events. False where a batch before it is missing (or too much came): read a snapshot."""
        if seq <= self.seq:
            return True  # told twice
        if self.seq < 0 or seq != self.seq + 1:
            return False
        if cleared:
            self._names.clear()
        self._names.difference_update(removed)
        self._names.update(stored)
        for name in stored:
            self._expected.pop(name, None)
        self.seq = seq
        return len(self._names) <= self._max_names

    def expect(self, names: Sequence[bytes], now_s: float) -> None:
        """The prompt with these names was routed here; its blocks will be stored soon."""
        self._expire(now_s)
        until = now_s + SPECULATIVE_S
        for name in reversed(names):  # children first, so that the oldest to be dropped are never parents
            if name in self._names:
                break
            self._expected[name] = until
            self._order.append((until, name))

    def depth(self, names: Sequence[bytes], now_s: float) -> int:
        """How many leading blocks of a prompt are here, by bisection."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high + 1) // 2
            name = names[middle - 1]
            if name in self._names or self._expected.get(name, 0.0) > now_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _expire(self, now_s: float) -> None:
        while self._order and (self._order[0][0] <= now_s or len(self._order) > MAX_SPECULATIVE):
            until, name = self._order.popleft()
            if self._expected.get(name) == until:
                del self._expected[name]
