"""The data path of simulated workers: real writer sessions over a wire that is late, loses, and lands after the fact.

A write reads its source when it lands, not when it is submitted, as one-sided transports do; what was on the wire when
a channel ended without the reader's word may land until the reader closes its listener. The wire checks at each
landing that both ends still belong to the ticket.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.pool import BlockPool
from kvstore.transfer import link as acts
from kvstore.transfer import messages as t
from kvstore.transfer.base import Peer, WriteState
from kvstore.transfer.session import SessionOptions, WriterSession
from kvstore.transfer.ticket import Item

Memory = dict[tuple[int, int], int]  # (layer, block) -> what lies there
UNWRITTEN, DAMAGED = -1, -2


class Violation(AssertionError):
    """Something happened that the hand-off promises never happens."""


@dataclass
class Weather:
    """What the wire does to writes now: shares of them."""

    fails: float = 0.0  # reported as failed; half of them land all the same, later
    sticks: float = 0.0  # never reported; land at any time until the fence
    damages: float = 0.0
    slow_s: float = 0.01
    is_confirming: bool = True  # readers confirm the end of a channel


class Ground(Protocol):
    """What a transfer process knows of the worker that it belongs to."""

    name: str
    memory: Memory
    pool: BlockPool
    is_alive: bool

    def takes(self, owner: str, block: int) -> bool: ...
    def tell(self, message: Any) -> None: ...


class World(Protocol):
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    rng: random.Random
    weather: Weather
    asks_once: bool  # the reader is asked about a ticket once for each channel, as with mooncake; else for each write
    listeners: dict[str, Listener]

    def is_cut(self, a: str, b: str) -> bool: ...
    def owner_of(self, ticket_id: str) -> str: ...
    def source_of(self, ticket_id: str) -> str: ...
    def violate(self, text: str) -> None: ...


@dataclass(eq=False)
class Listener:
    """One writer's way into a reader's memory."""

    ground: Ground
    segment: str
    is_open: bool = True
    allowed: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    landing: set[str] = field(default_factory=set)  # tickets that the connected writer has asked for
    channel: Channel | None = None
    stragglers: list[tuple[Item, list[int]]] = field(default_factory=list)  # of ended channels: bytes under way

    def lets(self, ticket_id: str) -> bool:
        return self.is_open and ticket_id in self.allowed and ticket_id not in self.forbidden

    def revoke(self, ticket_id: str, asks_once: bool) -> bool:
        self.forbidden.add(ticket_id)
        if not asks_once:
            self.stragglers = [s for s in self.stragglers if s[0].ticket.ticket_id != ticket_id]
            return True
        return ticket_id not in self.landing or (self.channel is None and not self.stragglers)

    def close(self) -> None:
        self.is_open, self.stragglers = False, []


class Channel:
    """One writer's connection; at most one for each peer."""

    def __init__(self, world: World, ground: Ground, listener: Listener, report: Callable[..., None]) -> None:
        self._world, self._ground, self._listener, self._report = world, ground, listener, report
        self._under_way: dict[int, Item] = {}
        self._asked: dict[str, bool] = {}
        self.is_open = True
        listener.stragglers = []  # a reader takes a new connection once the last one's bytes are in or gone
        listener.landing = set()
        listener.channel = self

    def submit(self, items: tuple[Item, ...]) -> None:
        world = self._world
        for item in items:
            self._under_way[item.number] = item
            delay_s = world.rng.uniform(0, world.weather.slow_s)
            luck = world.rng.random()
            if luck < world.weather.fails:
                world.loop.call_later(delay_s, self._end, item, WriteState.FAILED)
                delay_s += world.rng.choice((0.5, 1e9))
            elif luck < world.weather.fails + world.weather.sticks:
                delay_s += world.rng.choice((1.0, 3.0, 1e9))
            world.loop.call_later(delay_s, self._arrive, item)

    def _arrive(self, item: Item) -> None:
        if item.number not in self._under_way or not self.is_open:
            return
        if self._world.is_cut(self._ground.name, self._listener.ground.name):
            self._world.loop.call_later(0.5, self._arrive, item)
            return
        landed = self._allows(item.ticket.ticket_id)
        if landed:
            land(self._world, self._listener, item, read(self._world, self._ground, item))
        self._under_way.pop(item.number)
        self._end(item, WriteState.DONE if landed else WriteState.FAILED)

    def _allows(self, ticket_id: str) -> bool:
        if not self._listener.is_open or not self._listener.ground.is_alive:
            return False
        if not self._world.asks_once:
            return self._listener.lets(ticket_id)
        if ticket_id not in self._asked:
            self._asked[ticket_id] = self._listener.lets(ticket_id)
            if self._asked[ticket_id]:
                self._listener.landing.add(ticket_id)
        return self._asked[ticket_id]

    def _end(self, item: Item, state: WriteState) -> None:
        if self.is_open:
            self._report(item, state)

    def close(self, *, abruptly: bool = False) -> bool:
        """True: the reader confirms that nothing is under way; else that may land until the listener is closed."""
        self.is_open = False
        reader, world = self._listener.ground, self._world
        confirmed = not reader.is_alive or not self._listener.is_open
        if not abruptly and world.weather.is_confirming and not world.is_cut(self._ground.name, reader.name):
            confirmed = True
        left, self._under_way = list(self._under_way.values()), {}
        if not confirmed:
            for item in left:
                if world.rng.random() < 0.5 and self._allows(item.ticket.ticket_id):
                    straggler = (item, read(world, self._ground, item))
                    self._listener.stragglers.append(straggler)
                    world.loop.call_later(world.rng.uniform(0, 8), _land_late, world, self._listener, straggler)
        if self._listener.channel is self:
            self._listener.channel = None
        return confirmed


def read(world: World, ground: Ground, item: Item) -> list[int]:
    """What a write takes out of the writer's memory now; the blocks must still be its source's."""
    if not ground.is_alive:
        return []
    owner, run = world.source_of(item.ticket.ticket_id), item.run
    for block in range(run.source_block, run.source_block + run.count):
        if not holds(ground.pool, owner, block):
            world.violate(f"a write of {item.ticket.ticket_id} reads block {block} of {ground.name}, not {owner}'s")
    return [ground.memory.get((run.layer, run.source_block + i), UNWRITTEN) for i in range(run.count)]


def land(world: World, listener: Listener, item: Item, content: list[int]) -> None:
    """Put a write's bytes into the reader's memory; the blocks must still be its ticket's."""
    ground, run, owner = listener.ground, item.run, world.owner_of(item.ticket.ticket_id)
    for i, tag in enumerate(content):
        block = run.target_block + i
        if not ground.takes(owner, block):
            world.violate(f"a write of {item.ticket.ticket_id} lands in block {block} of {ground.name}, not {owner}'s")
        is_damaged = world.rng.random() < world.weather.damages
        ground.memory[(run.layer, block)] = DAMAGED if is_damaged else tag


def _land_late(world: World, listener: Listener, straggler: tuple[Item, list[int]]) -> None:
    if straggler in listener.stragglers and listener.ground.is_alive:
        listener.stragglers.remove(straggler)
        land(world, listener, *straggler)


def _tables(pool: BlockPool, owner: str) -> list[Any]:
    return [pool._tables[owner]] if owner in pool._tables else []


def is_quarantined(pool: BlockPool, block: int) -> bool:
    return block in pool._quarantine


def holds(pool: BlockPool, owner: str, block: int) -> bool:
    """Whether nobody can write a block but its owner: it refers to it, or the block waits for the owner's fence."""
    if any(block in table.blocks for table in _tables(pool, owner)):
        return True
    return is_quarantined(pool, block)


class Transfers:
    """A transfer process: a real `WriterSession`, and listeners, over the simulated wire."""

    _numbers = itertools.count()

    def __init__(self, world: World, ground: Ground, geometry: Any) -> None:
        self._world, self._ground = world, ground
        self.session = WriterSession(geometry, SessionOptions())
        self._channels: dict[Peer, Channel] = {}
        self.ports: dict[Peer, Listener | None] = {}
        self._fences: dict[Peer, list[t.Fence]] = {}
        self._halves: dict[Peer, set[str]] = {}
        self._last_s = 0.0
        self._wakeup: asyncio.TimerHandle | None = None
        self.is_alive = True

    def handle(self, message: Any) -> None:
        """Messages of the service process, in their order, a moment later."""
        self._in_order(self._take, message)

    def on_progress(self, progress: Any) -> None:
        self._in_order(self._progress, progress)

    def die(self) -> None:
        """What was on the wire may land until its reader closes the listener."""
        self.is_alive = False
        for channel in self._channels.values():
            channel.close(abruptly=True)
        for listener in self.ports.values():
            if listener is not None:
                listener.close()

    def _later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        def run() -> None:
            if self.is_alive:
                call(*arguments)
                self._act()

        return self._world.loop.call_later(delay_s, run)

    def _in_order(self, call: Callable[..., None], argument: Any) -> None:
        """A pipe: timers of one moment fire in any order, so no two share one."""
        now_s = self._world.loop.time()
        self._last_s = max(self._last_s + 1e-6, now_s + 0.001)
        self._later(self._last_s - now_s, call, argument)

    def _progress(self, progress: Any) -> None:
        self.session.on_progress(progress, self._world.loop.time())

    def _take(self, message: Any) -> None:
        now_s, session = self._world.loop.time(), self.session
        match message:
            case t.OpenSource():
                session.open_source(message, now_s)
            case t.CloseSource():
                session.close_source(message, now_s)
            case t.OpenTicket():
                session.open_ticket(message, now_s)
            case t.CloseTicket():
                session.close_ticket(message, now_s)
            case t.Resend():
                session.resend(message, now_s)
            case t.Fence():
                self._fence(message)
            case t.Verify():
                self._later(0.01, self._verify, message)
            case _:
                self._port(message)

    def _port(self, message: Any) -> None:
        peer = Peer(message.worker_id, message.epoch)
        listener = self.ports.get(peer)
        match message:
            case t.OpenListener():
                listener = listener or self._listen(peer)
                self._tell(t.ListenerReady(worker_id=peer.worker_id, epoch=peer.epoch, segment=listener.segment))
            case t.Allow():
                assert listener is not None, "a ticket is allowed where nobody listens"
                listener.allowed.add(message.ticket_id)
            case t.Revoke():
                fenced = listener is None or listener.revoke(message.ticket_id, self._world.asks_once)
                self._tell(t.TicketClosed(ticket_id=message.ticket_id, fenced=fenced))

    def _listen(self, peer: Peer) -> Listener:
        listener = self.ports[peer] = Listener(self._ground, f"segment-{next(self._numbers)}")
        self._world.listeners[listener.segment] = listener
        return listener

    def _fence(self, message: t.Fence) -> None:
        peer = Peer(message.worker_id, message.epoch)
        waiting = self._fences.setdefault(peer, [])
        waiting.append(message)
        if len(waiting) == 1:
            self._begin_fence(peer, message)

    def _begin_fence(self, peer: Peer, message: t.Fence) -> None:
        self._halves[peer] = set()
        self.session.fence(message, self._world.loop.time())
        self._later(self._world.rng.uniform(0.01, 1.0), self._fence_port, peer, message.forget)

    def _fence_port(self, peer: Peer, forget: bool) -> None:
        listener = self.ports.pop(peer, None)
        if listener is not None:
            listener.close()
            if not forget:
                self._listen(peer).allowed = listener.allowed - listener.forbidden
        self._half(peer, "port")

    def _half(self, peer: Peer, which: str) -> None:
        if peer not in self._halves:
            return
        self._halves[peer].add(which)
        if len(self._halves[peer]) == 2:
            del self._halves[peer]
            self._fences[peer].pop(0)
            listener = self.ports.get(peer)
            segment = listener.segment if listener else ""
            self._tell(t.Fenced(worker_id=peer.worker_id, epoch=peer.epoch, segment=segment))
            if self._fences[peer]:
                self._begin_fence(peer, self._fences[peer][0])

    def _verify(self, message: t.Verify) -> None:
        bad = [e for e in message.extents if _digest(self._ground.memory, e.layer, e.block, e.count) != e.digest]
        self._tell(t.Verified(ticket_id=message.ticket_id, bad=tuple(bad)))

    def _tell(self, message: Any) -> None:
        self._in_order(self._ground.tell, message)

    def _act(self) -> None:
        now_s = self._world.loop.time()
        self.session.pump(now_s)
        for action in self.session.take_actions():
            match action:
                case acts.OpenLink():
                    self._later(0.01, self._connect, action.peer, action.segment)
                case acts.CloseLink():
                    self._later(self._world.rng.uniform(0.01, 0.4), self._disconnect, action.peer)
                case acts.Submit():
                    self._channels[action.peer].submit(action.items)
                case acts.Hash():
                    self._later(0.005, self._hash, action.items)
                case acts.Tell():
                    self._tell(action.message)
                case acts.LinkFenced():
                    self._half(action.peer, "link")
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        wakeup_s = self.session.next_wakeup_s()
        if wakeup_s is not None:
            self._wakeup = self._later(max(0.001, wakeup_s - now_s), lambda: None)

    def _connect(self, peer: Peer, segment: str) -> None:
        listener = self._world.listeners.get(segment)
        reachable = listener is not None and listener.is_open and listener.ground.is_alive
        if not reachable or self._world.is_cut(self._ground.name, peer.worker_id):
            self.session.on_connect_failed(peer, f"{peer.worker_id} is not reachable")
            return
        assert listener is not None

        def report(item: Item, state: WriteState) -> None:
            self._later(0.001, self._result, peer, item.number, state)

        self._channels[peer] = Channel(self._world, self._ground, listener, report)
        self.session.on_connected(peer)

    def _result(self, peer: Peer, number: int, state: WriteState) -> None:
        self.session.on_results(peer, {number: state}, self._world.loop.time())

    def _disconnect(self, peer: Peer) -> None:
        channel = self._channels.pop(peer, None)
        self.session.on_closed(peer, channel is None or channel.close())

    def _hash(self, items: tuple[Item, ...]) -> None:
        memory = self._ground.memory
        self.session.on_hashed([(i, _digest(memory, i.run.layer, i.run.source_block, i.run.count)) for i in items])


def _digest(memory: Memory, layer: int, block: int, count: int) -> int:
    return hash(tuple(memory.get((layer, block + i), UNWRITTEN) for i in range(count))) & 0xFFFFFFFFFFFFFFFF
