"""The writer's side of one ticket: blocks of this worker on their way to one reader."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState, advance
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.live import LiveRequest


class TicketLost(Exception):
    """This ticket cannot be completed; what it was for may go on without it."""

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
    closing: asyncio.Task[None] | None = None  # fences it and tells the reader
    on_wire: bool = False  # OpenTicket was sent
    is_confirmed: bool = True  # False: the transfer process ended, and what it had sent may still land at the reader
    num_bytes: int = 0
    transport: str = ""  # that the reader has chosen
    prefix: str = ""  # of its arrows' names in the timeline

    @property
    def peer(self) -> tuple[str, str]:
        return self.reader.worker_id, self.reader.epoch

    def move(self, to: HandoffState, **detail: Any) -> None:
        """Along one arrow of the table; the request's timeline gets the arrow's name."""
        arrow = advance(self.state, to)
        self.state = to
        self.core.emit_event(self.live, self.prefix + arrow, side="writer", ticket=self.ticket_id, **detail)

    def lose(self, message: str) -> None:
        """Make whoever waits for this ticket's bytes see that they will not come."""
        self.wire.put_nowait(lost(message))
