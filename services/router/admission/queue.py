"""Requests that wait, in order, within bounds on how many they are and how many prompt tokens they have.

add ─► waiting ─remove─► sent, or gone
  └──► shed: lowest priority first, and of equal ones the last in order
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.router.admission.order import Waiting

W = TypeVar("W", bound=Waiting)


@dataclass(slots=True)
class WaitingQueue(Generic[W]):
    """Keys are set before a request is added. A request alone in the queue may be longer than ``max_tokens``."""

    max_requests: int
    max_tokens: int
    tokens: int = 0
    _waiting: list[W] = field(default_factory=list)  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[W]:
        """In order; over what is there now, so that the caller may remove some."""
        return iter(tuple(self._waiting))

    def add(self, w: W) -> list[W]:
        """Put it in its place; returns who has to leave for it, or ``[w]`` where w itself finds no place.

        Those who leave are removed here. Nobody leaves in vain.
        """
        shed: list[W] = []
        count, tokens = len(self._waiting) + 1, self.tokens + w.tokens
        worse = sorted((x for x in self._waiting if _rank(x) > _rank(w)), key=_rank)
        while count > 1 and (count > self.max_requests or tokens > self.max_tokens):
            if not worse:
                return [w]
            shed.append(worse.pop())
            count, tokens = count - 1, tokens - shed[-1].tokens
        for x in shed:
            self.remove(x)
        insort(self._waiting, w, key=_key)
        self.tokens += w.tokens
        return shed

    def remove(self, w: W) -> bool:
        """False where it is not in the queue."""
        at = bisect_left(self._waiting, w.key, key=_key)
        if at == len(self._waiting) or self._waiting[at] is not w:
            return False
        del self._waiting[at]
        self.tokens -= w.tokens
        return True


def _key(w: Waiting) -> tuple[float, int]:
    return w.key


def _rank(w: Waiting) -> tuple[int, tuple[float, int]]:
    return w.priority, w.key
