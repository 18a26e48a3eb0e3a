"""What a transport is: one-sided writes from this worker's KV memory into a peer's, with an end that can be forced.

Life of a write:

    submit ─┬► on the wire ─► DONE      the bytes are in the reader's memory
            │            └──► FAILED    may still land (with newer content) until the channel is closed
            └► REFUSED                  it was never started

Only DONE, or a closed channel, is terminal: blocks under a FAILED or unfinished write stay quarantined until
`Channel.close` returns. That is the fence. A transport has one channel, and one listener, for each peer epoch, so
that fencing one peer disturbs no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvstore.errors import FailureKind, SubmitFailed, TransferError


@dataclass(frozen=True, slots=True)
class Region:
    """The KV memory of this worker, mapped in this process."""

    address: int  # of the first byte in this process
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One process start of one worker."""

    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Write:
    """Copy ``num_bytes`` from ``source_offset`` of our region to ``target_offset`` of the reader's region."""

    source_offset: int
    target_offset: int
    num_bytes: int
    ticket_id: str  # a transport that can check it at the reader fences by ticket


class WriteState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"  # at completion
    REFUSED = "refused"  # at submission; a transport may also report such a write as FAILED

    @property
    def failure(self) -> FailureKind | None:
        """At which stage it failed, if it did."""
        return {WriteState.FAILED: FailureKind.COMPLETION, WriteState.REFUSED: FailureKind.SUBMIT}.get(self)


class ChannelStuck(TransferError):
    """A channel that cannot be closed from inside its process; ending the process closes it."""


def check_source(region: Region, writes: Sequence[Write]) -> None:
    """Raise SubmitFailed where a write would read outside our memory."""
    for write in writes:
        if write.source_offset < 0 or write.num_bytes < 1 or write.source_offset + write.num_bytes > region.num_bytes:
            raise SubmitFailed(
                f"write of {write.num_bytes} bytes at {write.source_offset} leaves the source memory "
                f"of {region.num_bytes} bytes"
            )


class Listener(Protocol):
    """The reader's end towards one peer."""

    @property
    def segment(self) -> str:
        """What the writer must know to connect; travels inside a grant, at most 4 KB of text."""

    def allow(self, ticket_id: str) -> None:
        """Writes of this ticket may land from now on."""

    def revoke(self, ticket_id: str) -> bool:
        """Forbid the ticket. True: no write of it can land any more. False: only `close` makes sure of that."""

    def close(self) -> None:
        """Fence: when this returns nothing that the peer sent can land. At most 2 s, else TransferError."""


class Channel(Protocol):
    """The writer's end towards one reader."""

    def submit(self, writes: Sequence[Write]) -> list[int]:
        """Start each write; returns an id for each. May block while the peer is frozen: one thread for each peer.

        Raises SubmitFailed where nothing was started.
        """

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        """States of these ids; an id whose state is not PENDING is forgotten. Never blocks."""

    def close(self) -> None:
        """Fence: when this returns no write of this channel can land any more. Other threads may be in submit or poll.

        Raises TransferError where the reader did not confirm it in time: our memory is read no more, but what was on
        the wire may still land until the reader closes its listener; ChannelStuck where even our memory may still be
        read.
        """


class Transport(Protocol):
    """Built once in the transfer process, over the whole KV memory. Constructors open nothing."""

    name: str

    def listen(self, region: Region, peer: Peer) -> Listener:
        """Make the region writable by that peer. Raises TransportUnavailable, TransferError."""

    def connect(self, region: Region, peer: Peer, segment: str) -> Channel:
        """Reach the memory behind a segment that the peer's `listen` gave. Raises TransferError."""
