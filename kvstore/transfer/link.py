"""What a writer does to its peers: the acts of a session, and for each peer the runs that wait and those on the wire.

Link of a peer (one channel at a time):

    none ─► connecting ─► open ─► closing ─► none | connecting        closing is the fence; live tickets then go again
               └─► none  (its tickets have failed)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.transfer.base import Peer
from kvstore.transfer.ticket import SENDING, Item, Ticket


@dataclass(frozen=True, slots=True)
class OpenLink:
    peer: Peer
    segment: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Fence: answered by `WriterSession.on_closed`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Submit:
    peer: Peer
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Hash:
    """Digest these runs over the source memory: answered by `WriterSession.on_hashed`."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    message: object


@dataclass(frozen=True, slots=True)
class LinkFenced:
    """The writing half of a Fence is over."""

    peer: Peer


Action = OpenLink | CloseLink | Submit | Hash | Tell | LinkFenced


class Link(StrEnum):
    NONE = "none"
    CONNECTING = "connecting"
    OPEN = "open"
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class PeerQueue:
    peer: Peer
    segment: str
    link: Link = Link.NONE
    tickets: dict[str, Ticket] = field(default_factory=dict)
    waiting: deque[Item] = field(default_factory=deque)
    on_wire: dict[int, Item] = field(default_factory=dict)
    failed: list[Item] = field(default_factory=list)  # may still land until the link is closed
    is_asked_to_fence: bool = False
    is_over: bool = False  # the peer's epoch ended

    def has_use(self) -> bool:
        return any(t.state in SENDING for t in self.tickets.values())

    def may_submit(self, max_outstanding: int) -> bool:
        return self.link is Link.OPEN and bool(self.waiting) and len(self.on_wire) < max_outstanding

    def drop_waiting(self, ticket: Ticket) -> None:
        self.waiting = deque(i for i in self.waiting if i.ticket is not ticket)

    def take_ready(self, throttle: Throttle, max_outstanding: int, now_s: float) -> list[Item]:
        """Move to the wire what flow control and throttle let go now, oldest first."""
        batch: list[Item] = []
        while self.may_submit(max_outstanding) and throttle.book(self.waiting[0], now_s) <= now_s:
            item = self.waiting.popleft()
            self.on_wire[item.number] = item
            item.ticket.on_wire += 1
            batch.append(item)
        return batch

    def take_unfinished(self, is_confirmed: bool) -> list[Item]:
        """Empty the wire of a closed link; the runs that were on it, oldest first."""
        unfinished = sorted([*self.on_wire.values(), *self.failed], key=lambda i: i.number)
        self.on_wire.clear()
        self.failed.clear()
        for item in unfinished:
            item.ticket.on_wire -= 1
            item.ticket.is_confirmed &= is_confirmed
        return unfinished


class Throttle:
    """A wire of limited speed: runs occupy it one after another. 0 bytes per second: no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def book(self, item: Item, now_s: float) -> float:
        """When the run will have arrived; asked again about one that is not due, the same."""
        if not self._bytes_per_s:
            item.start_s = item.release_s = now_s
        elif item.release_s is None:
            item.start_s = max(item.queued_s, self._free_s)
            self._free_s = item.release_s = item.start_s + item.write.num_bytes / self._bytes_per_s
        return item.release_s
