"""A writer's tickets, whoever asked for them, and the readers that they go to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.transfer import messages as t
from services.worker.core import WorkerCore
from services.worker.handoff.leases import LeaseKeeper
from services.worker.handoff.ticket import Ticket
from services.worker.peers import Peers

CLOSE_WAIT_S = 10.0
"""How long the transfer process may take to fence; past it, it is killed, which fences everything."""

_log = logging.getLogger("pdray.worker.handoff")


class Outbox:
    """All tickets of one worker as a writer. ``on_lapse``: see `LeaseKeeper`."""

    def __init__(self, core: WorkerCore, peers: Peers, on_lapse: Callable[[tuple[str, str], str], None]) -> None:
        self._core = core
        self.tickets: dict[str, Ticket] = {}
        self.leases = LeaseKeeper(core, peers, on_lapse)

    def drop(self, ticket: Ticket) -> None:
        """The ticket is over, and the reader knows or is bound to notice."""
        self.tickets.pop(ticket.ticket_id, None)
        self.leases.drop(ticket)

    async def fenced(self, ticket: Ticket) -> bool:
        """Whether nothing of the ticket can land at the reader any more; our own blocks are free either way."""
        ticket.closed = asyncio.get_running_loop().create_future()
        self._core.send_transfer(t.CloseTicket(ticket_id=ticket.ticket_id))
        try:
            return await asyncio.wait_for(asyncio.shield(ticket.closed), CLOSE_WAIT_S)
        except TimeoutError:
            _log.error("ticket %s is not fenced after %.0f s: ending the transfers", ticket.ticket_id, CLOSE_WAIT_S)
            self._core.kill_transfer()
            return False

    def on_transfer(self, message: object) -> None:
        """Any message of the transfer child."""
        if isinstance(message, t.Pushed | t.PushFailed):
            ticket = self.tickets.get(message.ticket_id)
            if ticket is not None:
                ticket.wire.put_nowait(message)
        elif isinstance(message, t.TicketClosed):
            ticket = self.tickets.get(message.ticket_id)
            if ticket is not None and ticket.closed is not None and not ticket.closed.done():
                ticket.closed.set_result(message.fenced)

    def on_transfer_lost(self) -> None:
        """Its end lets go of our memory, so every ticket is over on this side."""
        for ticket in self.tickets.values():
            ticket.is_confirmed = not ticket.on_wire
            ticket.on_wire = False
            ticket.lose("the transfer process ended")
            if ticket.closed is not None and not ticket.closed.done():
                ticket.closed.set_result(False)
