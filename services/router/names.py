"""Sets of block names at about twelve bytes a name, and the depth of a prompt in one by bisection.

Kept of a name are 64 bits, Python's own hash of it (keyed for each process, and remembered by the name itself), in one
array of buckets of 16 slots, sorted and filled up with the largest number: a lookup is a bisection in one bucket and
touches two cache lines that lie together. That is what it costs: with millions of names nothing is in the processor's
caches, and buckets of 64 slots, of which a bisection touches four lines, took up to two thirds longer.

Two names meet with a chance of one in 2^64, so among five million blocks about one lookup in 4 * 10^12 says that a
block is there which is not: a hint that is wrong, which costs a hit and no more. A `set` of the names takes eight times
as much memory, and the sets of all workers are what would bound a router.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

SLOTS = 16
"""Of a bucket."""
MEAN_NAMES = 11
"""Of all buckets, at most: then about one name in a hundred finds its bucket full, and goes beside."""
GROWTH = 1.5
_EMPTY = (1 << 63) - 1


class NameSet:
    """Add, discard and look up cost about a microsecond, whatever the size. Not thread-safe."""

    __slots__ = ("_beside", "_count", "_expected", "_size", "_slots", "_sum")

    def __init__(self, names: Collection[bytes] = (), expected: int = 0) -> None:
        """``expected``: names that it will come to hold; past an eighth of them it makes room for all at once, since
        growing takes as long as adding everything again."""
        self._expected = expected
        self._size = 0
        self._sum = 0  # of all hashes, by exclusive or
        self._beside: set[int] = set()
        self._count = 1
        self._slots = _empty(1)
        if names:
            self.update(names)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: bytes) -> bool:
        key = hash(name)
        low = key % self._count * SLOTS
        return self._slots[bisect_left(self._slots, key, low, low + SLOTS)] == key or key in self._beside

    def same_as(self, other: NameSet) -> bool:
        """Whether both hold the same names, but for a chance of one in 2^64; at a cost that no size raises."""
        return (self._size, self._sum) == (other._size, other._sum)

    @property
    def memory_bytes(self) -> int:
        return sys.getsizeof(self._slots) + sys.getsizeof(self._beside)

    def update(self, names: Collection[bytes]) -> None:
        self._make_room(self._size + len(names))
        self._add(map(hash, names))

    def difference_update(self, names: Iterable[bytes]) -> None:
        slots, beside, count = self._slots, self._beside, self._count
        for name in names:
            key = hash(name)
            low = key % count * SLOTS
            last = low + SLOTS - 1
            at = bisect_left(slots, key, low, last + 1)
            if slots[at] == key:
                slots[at:last] = slots[at + 1 : last + 1]
                slots[last] = _EMPTY
            elif key in beside:
                beside.remove(key)
            else:
                continue
            self._size -= 1
            self._sum ^= key

    def depth(self, names: Sequence[bytes], low: int = 0, guess: int = 0) -> int:
        """How many leading names are in the set, which is prefix-closed; the first ``low`` are known to be.

        Looks first at the name behind ``guess``, then at the one before: a guess that is right costs two lookups, for
        a prompt that the set has nothing of (0) it costs one.
        """
        slots, beside, count = self._slots, self._beside, self._count
        high = len(names)
        middle = min(guess + 1, high) if low < guess else low + 1
        while low < high:
            key = hash(names[middle - 1])
            first = key % count * SLOTS
            if slots[bisect_left(slots, key, first, first + SLOTS)] == key or key in beside:
                low = middle
            else:
                high = middle - 1
            middle = high if high == guess else (low + high + 1) // 2
        return low

    def _make_room(self, size: int) -> None:
        if size <= self._count * MEAN_NAMES:
            return
        wanted = max(size, GROWTH * self._size)
        if 8 * size > self._expected:
            wanted = max(wanted, self._expected)
        keys = [key for key in (*self._slots, *self._beside) if key != _EMPTY]
        self._count = int(-(-wanted // MEAN_NAMES))
        self._slots, self._beside = _empty(self._count), set()
        self._size = self._sum = 0
        self._add(keys)

    def _add(self, keys: Iterable[int]) -> None:
        slots, beside, count, size, total = self._slots, self._beside, self._count, self._size, self._sum
        for key in keys:
            low = key % count * SLOTS
            last = low + SLOTS - 1
            at = bisect_left(slots, key, low, last + 1)
            found = slots[at]
            if found == key or key in beside:
                continue
            if slots[last] != _EMPTY:
                beside.add(key)
            else:
                if found != _EMPTY:
                    slots[at + 1 : last + 1] = slots[at:last]
                slots[at] = key
            size += 1
            total ^= key
        self._size, self._sum = size, total


def _empty(count: int) -> array[int]:
    """One slot more than the buckets have, so that what lies behind the last one can be looked at."""
    return array("q", (_EMPTY,)) * (count * SLOTS + 1)


def common_depth(here: Sequence[bytes], there: Sequence[bytes], low: int, high: int) -> int:
    """How many leading names two prompts share: at least ``low``, of their first ``high``; by bisection."""
    while low < high:
        middle = (low + high + 1) // 2
        if here[middle - 1] == there[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
