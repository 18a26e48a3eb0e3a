"""One ticket on the writer's side, and the merged runs that it consists of.

    OPEN ──────► PUSHED ◄──► RESENDING        everything computed so far is sent; Pushed is told; bad extents go again
      │ └──────────┬───────────┘ │
      │            ▼             │
      ├────────► CLOSING ◄───────┤            nothing more is sent, some writes are not done
      ▼            │             ▼
    FAILED ────────┴──────────► CLOSED        PushFailed was told; TicketClosed was told

A run is waiting, on the wire, or done; it is hashed independently of that. A ticket is pushed once each block of each
layer is computed, done and hashed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.errors import FailureKind
from kvstore.transfer.base import Peer, Write
from kvstore.transfer.messages import Extent, LayerTrace, Pushed
from kvstore.transfer.plan import Plan, Run
from kvstore.transfer.source import Piece, Source


class TicketState(StrEnum):
    OPEN = "open"
    PUSHED = "pushed"
    RESENDING = "resending"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


LEGAL = {
    TicketState.OPEN: {TicketState.PUSHED, TicketState.CLOSING, TicketState.FAILED, TicketState.CLOSED},
    TicketState.PUSHED: {TicketState.RESENDING, TicketState.CLOSING, TicketState.FAILED, TicketState.CLOSED},
    TicketState.RESENDING: {TicketState.PUSHED, TicketState.CLOSING, TicketState.FAILED, TicketState.CLOSED},
    TicketState.CLOSING: {TicketState.CLOSED},
    TicketState.FAILED: {TicketState.CLOSING, TicketState.CLOSED},
    TicketState.CLOSED: set(),
}

SENDING = (TicketState.OPEN, TicketState.RESENDING)


@dataclass(slots=True, eq=False)
class Item:
    """One merged run on its way."""

    number: int  # unique in this process; rises in the order of sending
    ticket: Ticket
    run: Run
    write: Write
    step: int
    computed_s: float
    queued_s: float
    start_s: float = 0.0  # began to occupy the wire
    release_s: float | None = None  # a throttle lets it go then
    is_done: bool = False
    digest: int | None = None

    @property
    def extent(self) -> Extent:
        return Extent(layer=self.run.layer, block=self.run.target_block, count=self.run.count, digest=self.digest or 0)


@dataclass(slots=True, eq=False)
class Ticket:
    ticket_id: str
    peer: Peer
    source: Source
    plan: Plan
    target_ids: tuple[int, ...]
    skip_blocks: int
    state: TicketState = TicketState.OPEN
    items: list[Item] = field(default_factory=list)
    unplanned_blocks: int = 0  # blocks times layers that are not computed yet
    undone: int = 0  # items
    unhashed: int = 0
    on_wire: int = 0
    num_bytes: int = 0
    failures: int = 0
    submit_s: float = 0.0
    digest_s: float = 0.0
    last_failure: FailureKind = FailureKind.COMPLETION
    is_confirmed: bool = True  # no write of a closed channel may still land
    deadline_s: float = 0.0  # while CLOSING: fence the peer then
    resent: list[Item] | None = None
    traces: dict[tuple[int, int], LayerTrace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unplanned_blocks = self.source.num_layers * (len(self.target_ids) - self.skip_blocks)

    def advance(self, state: TicketState) -> None:
        assert state in LEGAL[self.state], f"ticket {self.ticket_id}: {self.state} to {state}"
        self.state = state

    @property
    def is_complete(self) -> bool:
        """Every block of every layer is computed, in the reader's memory and hashed."""
        return not (self.unplanned_blocks or self.undone or self.unhashed)

    def pushed(self) -> Pushed:
        """What the service process is told: of a first push all extents, else those that went again."""
        told = self.items if self.resent is None else self.resent
        return Pushed(
            ticket_id=self.ticket_id,
            extents=tuple(item.extent for item in told),
            num_bytes=self.num_bytes,
            layers=tuple(self.traces.values()),
            submit_s=self.submit_s,
            digest_s=self.digest_s,
        )

    def window(self, piece: Piece) -> tuple[int, int]:
        """(first, count) of those blocks of a piece that the reader needs."""
        first = max(piece.first, self.skip_blocks)
        return first, max(0, piece.first + piece.count - first)

    def note_done(self, item: Item, now_s: float) -> None:
        """Book a run as landed, and its time in the trace of its layer."""
        item.is_done = True
        self.undone -= 1
        self.num_bytes += item.write.num_bytes
        key = (item.step, item.run.layer)
        old = self.traces.get(key)
        self.traces[key] = LayerTrace(
            step=item.step,
            layer=item.run.layer,
            computed_s=item.computed_s,
            submitted_s=min(item.start_s, old.submitted_s) if old else item.start_s,
            done_s=now_s,
            num_bytes=item.write.num_bytes + (old.num_bytes if old else 0),
        )
