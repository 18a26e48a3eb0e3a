"""What the writer sends when: a pure state machine over sources, tickets and peers; time is an argument, acts are
returned.

Everything computed goes out in the order in which it was computed, merged with its neighbours, at most
``max_outstanding`` runs on the wire to one peer. A failed write fences the peer and sends the ticket's unfinished
runs once more; a second one fails the ticket. Source memory of a held block never changes, so a run may be read again
at any time before CloseSource.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstore.errors import FailureKind, GeometryMismatch
from kvstore.geometry import KVGeometry
from kvstore.transfer import messages as m
from kvstore.transfer.base import Peer, WriteState
from kvstore.transfer.link import Action, CloseLink, Hash, Link, LinkFenced, OpenLink, PeerQueue, Submit, Tell, Throttle
from kvstore.transfer.plan import make_plan, merge_blocks
from kvstore.transfer.progress import Progress
from kvstore.transfer.source import Piece, ProgressTable, Source
from kvstore.transfer.ticket import SENDING, Item, Ticket, TicketState


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    layerwise: bool = True
    digests: bool = True
    max_outstanding: int = 512
    fence_after_s: float = 2.0
    throttle_bytes_per_s: int = 0


class WriterSession:
    """Feed it messages, progress and results; after each call `take_actions` says what to do."""

    def __init__(self, geometry: KVGeometry, options: SessionOptions) -> None:
        self._geometry = geometry
        self._options = options
        self._num_layers = geometry.groups[0].num_layers
        self._progress = ProgressTable(self._num_layers, options.layerwise)
        self._throttle = Throttle(options.throttle_bytes_per_s)
        self._sources: dict[str, Source] = {}
        self._tickets: dict[str, Ticket] = {}
        self._peers: dict[Peer, PeerQueue] = {}
        self._numbers = itertools.count(1)
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # What the service process asks for

    def open_source(self, message: m.OpenSource, now_s: float) -> None:
        source = self._sources[message.seq_id] = Source(message, self._num_layers, now_s)
        for piece in self._progress.take_early(message.seq_id):
            source.add(piece)

    def close_source(self, message: m.CloseSource, now_s: float) -> None:
        """Tickets that are still open are closed with it."""
        self._sources.pop(message.seq_id, None)
        for ticket in [t for t in self._tickets.values() if t.source.seq_id == message.seq_id]:
            self._close(ticket, now_s)

    def open_ticket(self, message: m.OpenTicket, now_s: float) -> None:
        if message.ticket_id in self._tickets:
            return
        peer = Peer(message.worker_id, message.epoch)
        queue = self._peers.setdefault(peer, PeerQueue(peer, message.segment))
        source = self._sources.get(message.seq_id)
        try:
            if queue.is_over:
                raise GeometryMismatch(f"this epoch of {peer.worker_id} is over")
            if source is None:
                raise GeometryMismatch(f"sequence {message.seq_id} has no source here")
            if not 0 <= message.skip_blocks <= len(source.block_ids):
                raise GeometryMismatch(f"cannot skip {message.skip_blocks} of {len(source.block_ids)} blocks")
            target = KVGeometry.from_dict(message.geometry)
            plan = make_plan(self._geometry, target, source.block_ids, message.block_ids)
        except (GeometryMismatch, KeyError, TypeError, ValueError) as exc:
            self._tell(m.PushFailed(ticket_id=message.ticket_id, message=str(exc), kind=FailureKind.PLAN))
            return
        ticket = Ticket(message.ticket_id, peer, source, plan, message.block_ids, message.skip_blocks)
        self._tickets[ticket.ticket_id] = ticket
        queue.tickets[ticket.ticket_id] = ticket
        self._connect(queue, message.segment)
        self._send_pieces(ticket, source.computed_so_far(), now_s)
        self._finish_if_complete(ticket)

    def close_ticket(self, message: m.CloseTicket, now_s: float) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is None:
            self._tell(m.TicketClosed(ticket_id=message.ticket_id, fenced=True))
        else:
            self._close(ticket, now_s)

    def resend(self, message: m.Resend, now_s: float) -> None:
        """Push the runs with these extents again, freshly hashed. The ticket fails where it has no such run."""
        ticket = self._tickets.get(message.ticket_id)
        if ticket is None or ticket.state is not TicketState.PUSHED:
            reason = "only a pushed ticket can be sent again"
            self._tell(m.PushFailed(ticket_id=message.ticket_id, message=reason, kind=FailureKind.PLAN))
            return
        wanted = {(e.layer, e.block, e.count) for e in message.extents}
        again = [i for i in ticket.items if (i.run.layer, i.run.target_block, i.run.count) in wanted]
        if not again or len(again) < len(wanted):
            ticket.last_failure = FailureKind.PLAN
            self._fail(ticket, f"{len(wanted) - len(again)} of {len(wanted)} extents are not of this ticket")
            return
        ticket.advance(TicketState.RESENDING)
        ticket.resent = again
        for item in again:
            item.is_done, item.digest, item.release_s, item.queued_s = False, None, None, now_s
            ticket.undone += 1
            item.number = next(self._numbers)
        queue = self._peers[ticket.peer]
        self._connect(queue, queue.segment)
        self._send_items(ticket, again)

    def fence(self, message: m.Fence, now_s: float) -> None:
        """Ends in a LinkFenced action."""
        peer = Peer(message.worker_id, message.epoch)
        queue = self._peers.get(peer)
        if queue is None:
            self._actions.append(LinkFenced(peer))
            return
        queue.is_asked_to_fence = True
        queue.is_over = queue.is_over or message.forget
        self._start_fence(queue)

    # What happened meanwhile

    def on_progress(self, message: Progress, now_s: float) -> None:
        for seq_id, piece in self._progress.on_progress(message):
            source = self._sources.get(seq_id)
            if source is None:
                self._progress.keep_early(seq_id, piece, now_s)
                continue
            new = source.add(piece)
            for ticket in self._tickets.values():
                if ticket.source is source and ticket.state is TicketState.OPEN:
                    self._send_pieces(ticket, new, now_s)

    def on_hashed(self, results: Iterable[tuple[Item, int]]) -> None:
        for item, digest in results:
            item.digest = digest
            item.ticket.unhashed -= 1
            self._finish_if_complete(item.ticket)

    def on_connected(self, peer: Peer) -> None:
        queue = self._peers.get(peer)
        if queue is not None and queue.link is Link.CONNECTING:
            queue.link = Link.OPEN

    def on_connect_failed(self, peer: Peer, reason: str) -> None:
        queue = self._peers.get(peer)
        if queue is None or queue.link is not Link.CONNECTING:
            return
        queue.link = Link.NONE
        for ticket in [t for t in queue.tickets.values() if t.state in SENDING]:
            ticket.last_failure = FailureKind.CONNECT
            self._fail(ticket, reason)

    def on_results(self, peer: Peer, states: Mapping[int, WriteState], now_s: float) -> None:
        queue = self._peers.get(peer)
        if queue is None:
            return
        failed: set[Ticket] = set()
        for number, state in states.items():
            item = queue.on_wire.pop(number, None)
            if item is None:
                continue
            if state.failure is not None:
                item.ticket.last_failure = state.failure
                queue.failed.append(item)
                failed.add(item.ticket)
                continue
            item.ticket.on_wire -= 1
            item.ticket.note_done(item, now_s)
            self._finish_if_complete(item.ticket)
            if item.ticket.state is TicketState.CLOSING and not item.ticket.on_wire:
                self._forget(item.ticket)
        if queue.link is Link.OPEN:  # while it is closed for another reason, failing is no news
            for ticket in failed:
                ticket.failures += 1
        if failed:
            self._start_fence(queue)

    def on_closed(self, peer: Peer, is_confirmed: bool) -> None:
        """The link of this peer is closed; unconfirmed: what was on the wire may still land at the reader."""
        queue = self._peers.get(peer)
        if queue is None:
            return
        queue.link = Link.NONE
        unfinished = queue.take_unfinished(is_confirmed)
        self._after_fence(queue)
        for item in reversed(unfinished):
            if item.ticket.state in SENDING:
                item.release_s = None
                queue.waiting.appendleft(item)
        if queue.is_asked_to_fence:
            queue.is_asked_to_fence = False
            self._actions.append(LinkFenced(peer))
        if queue.has_use():
            self._connect(queue, queue.segment)
        elif queue.is_over and not queue.tickets:
            del self._peers[peer]

    def pump(self, now_s: float) -> None:
        """Put on the wire what flow control and throttle let go now, and fence what did not end in time."""
        for ticket in [t for t in self._tickets.values() if t.state is TicketState.CLOSING and t.deadline_s <= now_s]:
            self._start_fence(self._peers[ticket.peer])
        for queue in self._peers.values():
            batch = queue.take_ready(self._throttle, self._options.max_outstanding, now_s)
            if batch:
                self._actions.append(Submit(queue.peer, tuple(batch)))

    def next_wakeup_s(self) -> float | None:
        """When `pump` has something to do though nothing happens."""
        times = [
            t.deadline_s for t in self._tickets.values() if t.state is TicketState.CLOSING and self._is_open(t.peer)
        ]
        for queue in self._peers.values():
            if queue.may_submit(self._options.max_outstanding) and queue.waiting[0].release_s is not None:
                times.append(queue.waiting[0].release_s)
        return min(times, default=None)

    # Steps of the above

    def _is_open(self, peer: Peer) -> bool:
        queue = self._peers.get(peer)
        return queue is not None and queue.link is Link.OPEN

    def _tell(self, message: object) -> None:
        self._actions.append(Tell(message))

    def _connect(self, queue: PeerQueue, segment: str) -> None:
        if queue.link in (Link.CONNECTING, Link.OPEN) and segment != queue.segment:
            queue.segment = segment  # the reader opened another listener: the old one lets nothing land any more
            self._start_fence(queue)
        elif queue.link is Link.NONE and not queue.is_over:
            queue.segment = segment
            queue.link = Link.CONNECTING
            self._actions.append(OpenLink(queue.peer, segment))
        else:
            queue.segment = segment

    def _send_pieces(self, ticket: Ticket, pieces: Iterable[Piece], now_s: float) -> None:
        items: list[Item] = []
        for piece in pieces:
            first, count = ticket.window(piece)
            ticket.unplanned_blocks -= count
            for run in merge_blocks(piece.layer, ticket.source.block_ids, ticket.target_ids, first, count):
                write = ticket.plan.write(run, ticket.ticket_id)
                items.append(Item(next(self._numbers), ticket, run, write, piece.step, piece.computed_s, now_s))
        ticket.items += items
        ticket.undone += len(items)
        self._send_items(ticket, items)

    def _send_items(self, ticket: Ticket, items: list[Item]) -> None:
        if not items:
            return
        if self._options.digests:
            ticket.unhashed += len(items)
            self._actions.append(Hash(tuple(items)))
        self._peers[ticket.peer].waiting.extend(items)

    def _finish_if_complete(self, ticket: Ticket) -> None:
        if ticket.state in SENDING and ticket.is_complete:
            ticket.advance(TicketState.PUSHED)
            self._tell(ticket.pushed())

    def _start_fence(self, queue: PeerQueue) -> None:
        if queue.link in (Link.OPEN, Link.CONNECTING):
            queue.link = Link.CLOSING
            self._actions.append(CloseLink(queue.peer))
        elif queue.link is Link.NONE and queue.is_asked_to_fence:
            self.on_closed(queue.peer, True)

    def _after_fence(self, queue: PeerQueue) -> None:
        """Nothing of this peer is on the wire: close what was closing, fail what failed twice."""
        for ticket in list(queue.tickets.values()):
            if ticket.state is TicketState.CLOSING or queue.is_over:
                self._forget(ticket)
            elif ticket.failures > 1 and ticket.state in SENDING:
                self._fail(ticket, f"writes to {queue.peer.worker_id} failed twice")

    def _fail(self, ticket: Ticket, reason: str) -> None:
        self._peers[ticket.peer].drop_waiting(ticket)
        ticket.advance(TicketState.FAILED)
        self._tell(m.PushFailed(ticket_id=ticket.ticket_id, message=reason, kind=ticket.last_failure))

    def _close(self, ticket: Ticket, now_s: float) -> None:
        self._peers[ticket.peer].drop_waiting(ticket)
        if ticket.state is TicketState.CLOSING:
            return
        if not ticket.on_wire:
            self._forget(ticket)
            return
        ticket.advance(TicketState.CLOSING)
        ticket.deadline_s = now_s + self._options.fence_after_s

    def _forget(self, ticket: Ticket) -> None:
        ticket.advance(TicketState.CLOSED)
        self._peers[ticket.peer].drop_waiting(ticket)
        del self._tickets[ticket.ticket_id]
        self._peers[ticket.peer].tickets.pop(ticket.ticket_id, None)
        self._tell(m.TicketClosed(ticket_id=ticket.ticket_id, fenced=ticket.is_confirmed))
