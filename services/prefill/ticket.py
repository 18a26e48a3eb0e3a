"""The writer's side of one ticket, and the hand-off that may need several of them."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from kvstore.transfer import messages as t
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState, advance
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.live import LiveRequest


class TicketLost(Exception):
    """This ticket cannot be completed; the hand-off may go on with another reader."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def lost(message: str) -> TicketLost:
    return TicketLost(RequestError(ErrorCode.TRANSFER_FAILED, message))


@dataclass(slots=True)
class Ticket:
    """One try to move one prompt's KV to one reader."""

    core: WorkerCore
    live: LiveRequest
    reader: worker_pb2.Reader
    attempt: int
    ticket_id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: HandoffState = HandoffState.REQUESTED
    wire: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)  # Pushed | PushFailed | TicketLost for this ticket
    closed: asyncio.Future[bool] | None = None  # fenced, once the transfer process has let go
    on_wire: bool = False  # OpenTicket was sent
    is_confirmed: bool = True  # False: the transfer process ended, and what it had sent may still land at the reader
    extents: dict[tuple[int, int], t.Extent] = field(default_factory=dict)  # by (layer, block)
    num_bytes: int = 0

    @property
    def peer(self) -> tuple[str, str]:
        return self.reader.worker_id, self.reader.epoch

    def move(self, to: HandoffState, **detail: Any) -> None:
        """Along one arrow of the table; the request's timeline gets the arrow's name."""
        arrow = advance(self.state, to)
        self.state = to
        self.core.emit_event(self.live, arrow, side="writer", ticket=self.ticket_id, **detail)

    def lose(self, message: str) -> None:
        """Make whoever waits for this ticket's bytes see that they will not come."""
        self.wire.put_nowait(lost(message))


@dataclass(slots=True)
class Handoff:
    """One live request of the prefill worker, from Submit to the release of its blocks."""

    live: LiveRequest
    reader: worker_pb2.Reader
    attempt: int
    block_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)  # choice -> its token 1
    first_logprobs: dict[int, worker_pb2.TokenLogprobs] = field(default_factory=dict)  # where they were asked for
    drawn: asyncio.Event = field(default_factory=asyncio.Event)  # all of them are there, and some choice goes on
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # token 1 ended every choice: nothing to hand over
    retarget: asyncio.Queue[worker_pb2.RetargetRequest] = field(default_factory=asyncio.Queue)
    ticket: Ticket | None = None
    task: asyncio.Task[None] | None = None
    failed_over: bool = False  # a HandoffReport "failed" is out; the router may retarget
