"""The writing half of the transfer process: runs what a `WriterSession` decides, with one thread for each peer's
channel.

A lane's thread connects, submits and polls; nothing else touches its channel but the fence. Submitting to a frozen
peer may block, which stops that lane alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.errors import FailureKind, KVError, TransferError
from kvstore.geometry import KVGeometry
from kvstore.transfer import messages as m
from kvstore.transfer.base import Channel, ChannelStuck, Peer, Region, Transport, WriteState
from kvstore.transfer.digest import digest_bytes
from kvstore.transfer.link import CloseLink, Hash, LinkFenced, OpenLink, Submit, Tell
from kvstore.transfer.progress import Progress
from kvstore.transfer.session import SessionOptions, WriterSession
from kvstore.transfer.ticket import Item

CONNECT_S = 15.0  # longer than any transport's own limit
_POLL_MIN_S, _POLL_MAX_S = 0.0002, 0.001

log = logging.getLogger("pdray.transfer")


@dataclass(frozen=True, slots=True)
class Connected:
    peer: Peer


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    peer: Peer
    states: dict[int, WriteState]  # by item number


@dataclass(frozen=True, slots=True)
class Closed:
    peer: Peer
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class Hashed:
    results: tuple[tuple[Item, int], ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """Only the end of this process fences that peer."""

    peer: Peer
    reason: str


WriterEvent = Connected | ConnectFailed | Results | Closed | Hashed | Stuck
Report = Callable[[WriterEvent], None]


class Lane:
    """The thread of one channel, from connecting to closing."""

    def __init__(self, transport: Transport, region: Region, peer: Peer, segment: str, report: Report) -> None:
        self._transport = transport
        self._region = region
        self._peer = peer
        self._segment = segment
        self._report = report
        self._commands: queue.SimpleQueue[tuple[Item, ...] | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._connected = threading.Event()  # or failed to
        self.is_closing = False  # what fails from then on is no news
        self._thread = threading.Thread(target=self._run, name=f"lane-{peer.worker_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, items: tuple[Item, ...]) -> None:
        self._commands.put(items)

    def close(self) -> None:
        """Fence, in a thread of its own; reports Closed or Stuck, and nothing after it."""
        self.is_closing = True
        threading.Thread(target=self._close, name=f"fence-{self._peer.worker_id}", daemon=True).start()

    def _close(self) -> None:
        self._commands.put(None)
        is_confirmed = True
        try:
            if not self._connected.wait(CONNECT_S):
                raise ChannelStuck(f"connecting did not end within {CONNECT_S} s")
            if self._channel is not None:
                self._channel.close()
        except ChannelStuck as exc:
            self._report(Stuck(self._peer, str(exc)))
            return
        except TransferError as exc:
            log.warning("the end of the channel to %s is not confirmed: %s", self._peer.worker_id, exc)
            is_confirmed = False
        self._thread.join(CONNECT_S)
        if self._thread.is_alive():
            self._report(Stuck(self._peer, "its thread did not end"))
        else:
            self._report(Closed(self._peer, is_confirmed))

    def _run(self) -> None:
        try:
            self._channel = self._transport.connect(self._region, self._peer, self._segment)
        except (KVError, OSError) as exc:
            self._report(ConnectFailed(self._peer, str(exc)))
            return
        finally:
            self._connected.set()
        self._report(Connected(self._peer))
        self._serve(self._channel)

    def _serve(self, channel: Channel) -> None:
        pending: dict[int, int] = {}  # id of the transport: number of the item
        interval_s = _POLL_MIN_S
        while True:
            try:
                items = self._commands.get(timeout=interval_s if pending else None)
                if items is None:
                    return
                self._start(channel, items, pending)
                interval_s = _POLL_MIN_S
            except queue.Empty:
                interval_s = min(interval_s * 1.5, _POLL_MAX_S)
            ended = {i: state for i, state in channel.poll(list(pending)).items() if state is not WriteState.PENDING}
            if ended:
                self._report(Results(self._peer, {pending.pop(i): state for i, state in ended.items()}))
                interval_s = _POLL_MIN_S

    def _start(self, channel: Channel, items: tuple[Item, ...], pending: dict[int, int]) -> None:
        begun_s = time.thread_time()
        try:
            ids = channel.submit([item.write for item in items])
        except TransferError as exc:
            if not self.is_closing:
                log.warning("writes to %s could not be started: %s", self._peer.worker_id, exc)
            self._report(Results(self._peer, {item.number: WriteState.REFUSED for item in items}))
        else:
            pending.update(zip(ids, (item.number for item in items), strict=True))
        share_s = (time.thread_time() - begun_s) / len(items)
        for item in items:
            item.ticket.submit_s += share_s


class Writer:
    """Owns the session and the lanes; its methods are for the main thread only."""

    def __init__(
        self,
        transport: Transport,
        region: Region,
        memory: memoryview,
        start: m.Start,
        tell: Callable[[object], None],
        report: Report,
    ) -> None:
        self._transport = transport
        self._region = region
        self._memory = memory
        self._tell = tell
        self._report = report
        options = SessionOptions(
            layerwise=start.layerwise,
            digests=start.digests,
            max_outstanding=start.max_outstanding,
            fence_after_s=start.fence_after_ms / 1000,
            throttle_bytes_per_s=start.throttle_bytes_per_s,
        )
        self.session = WriterSession(KVGeometry.from_dict(start.geometry), options)
        self._lanes: dict[Peer, Lane] = {}
        self._hashers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash-source")

    def handle(self, message: object, now_s: float) -> bool:
        """False: the message is not one for a writer."""
        session = self.session
        match message:
            case m.OpenSource():
                session.open_source(message, now_s)
            case m.OpenTicket():
                session.open_ticket(message, now_s)
            case m.CloseTicket():
                session.close_ticket(message, now_s)
            case m.CloseSource():
                session.close_source(message, now_s)
            case m.Resend():
                session.resend(message, now_s)
            case _:
                return False
        return True

    def on_progress(self, progress: Progress, now_s: float) -> None:
        self.session.on_progress(progress, now_s)

    def on_event(self, event: WriterEvent, now_s: float) -> None:
        match event:
            case Connected():
                self.session.on_connected(event.peer)
            case ConnectFailed():
                self._count(event.peer, FailureKind.CONNECT, 1, event.reason)
                self.session.on_connect_failed(event.peer, event.reason)
            case Results():
                for kind, count in Counter(s.failure for s in event.states.values() if s.failure).items():
                    self._count(event.peer, kind, count)
                self.session.on_results(event.peer, event.states, now_s)
            case Closed():
                if not event.is_confirmed:
                    self._count(event.peer, FailureKind.CLOSE, 1)
                del self._lanes[event.peer]
                self.session.on_closed(event.peer, event.is_confirmed)
            case Hashed():
                self.session.on_hashed(event.results)
            case Stuck():
                raise ChannelStuck(f"{event.peer.worker_id}: {event.reason}")

    def _count(self, peer: Peer, kind: FailureKind, count: int, reason: str = "") -> None:
        lane = self._lanes.get(peer)
        if kind is FailureKind.CLOSE or (lane is not None and not lane.is_closing):
            told = m.TransfersFailed(worker_id=peer.worker_id, epoch=peer.epoch, kind=kind, count=count, message=reason)
            self._tell(told)

    def act(self, now_s: float) -> list[Peer]:
        """Do what the session decided; returns the peers whose fence is over."""
        self.session.pump(now_s)
        fenced: list[Peer] = []
        for action in self.session.take_actions():
            match action:
                case OpenLink():
                    lane = Lane(self._transport, self._region, action.peer, action.segment, self._report)
                    self._lanes[action.peer] = lane
                    lane.start()
                case CloseLink():
                    self._lanes[action.peer].close()
                case Submit():
                    self._lanes[action.peer].submit(action.items)
                case Hash():
                    self._hashers.submit(self._hash, action.items)
                case Tell():
                    self._tell(action.message)
                case LinkFenced():
                    fenced.append(action.peer)
        return fenced

    def _hash(self, items: tuple[Item, ...]) -> None:
        begun_s = time.thread_time()
        results = [(i, digest_bytes(self._memory, i.write.source_offset, i.write.num_bytes)) for i in items]
        items[0].ticket.digest_s += time.thread_time() - begun_s  # all of one ticket
        self._report(Hashed(tuple(results)))
