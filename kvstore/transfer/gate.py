"""Which tickets may land at a reader, and how many of their writes are landing now."""

from __future__ import annotations

import threading
from collections import OrderedDict

GRACE_S = 0.2
"""A write may overtake the message that allows its ticket, since they come on different ways: how long it is waited
for."""
MAX_FORBIDDEN = 4096


class Gate:
    """Safe in any thread. A ticket is unknown, allowed, or forbidden for good."""

    def __init__(self) -> None:
        self._allowed: set[str | bytes] = set()
        self._forbidden: OrderedDict[str | bytes, None] = OrderedDict()
        self._landing: dict[str | bytes, int] = {}
        self._changed = threading.Condition()

    def allow(self, ticket: str | bytes) -> None:
        with self._changed:
            if ticket not in self._forbidden:
                self._allowed.add(ticket)
            self._changed.notify_all()

    def forbid(self, ticket: str | bytes) -> None:
        with self._changed:
            self._allowed.discard(ticket)
            self._forbidden[ticket] = None
            if len(self._forbidden) > MAX_FORBIDDEN:
                self._forbidden.popitem(last=False)
            self._changed.notify_all()

    def is_allowed(self, ticket: str | bytes) -> bool:
        return ticket in self._allowed

    def enter(self, ticket: str | bytes) -> bool:
        """True: a write may land, and `leave` must be called after it. An unknown ticket is waited for."""
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._allowed or ticket in self._forbidden, GRACE_S)
            if ticket not in self._allowed:
                return False
            self._landing[ticket] = self._landing.get(ticket, 0) + 1
            return True

    def leave(self, ticket: str | bytes) -> None:
        with self._changed:
            self._landing[ticket] -= 1
            if not self._landing[ticket]:
                del self._landing[ticket]
            self._changed.notify_all()

    def leave_all(self) -> None:
        """Whoever was landing is gone."""
        with self._changed:
            self._landing.clear()
            self._changed.notify_all()

    def is_landing(self, ticket: str | bytes) -> bool:
        return ticket in self._landing

    def wait_empty(self, ticket: str | bytes, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: ticket not in self._landing, timeout_s)
