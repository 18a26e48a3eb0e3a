"""A writer's session whose wire is carried out by hand: nothing ends before the test says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer import link as acts
from kvstore.transfer import messages as m
from kvstore.transfer.base import Peer, WriteState
from kvstore.transfer.progress import Chunk, LayersDone, StepBegins, StepEnds
from kvstore.transfer.session import SessionOptions, WriterSession
from kvstore.transfer.ticket import Item

LAYERS, POOL = 3, 40
GROUP = KVGroup(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_size=2, dtype="float16")
GEOMETRY = KVGeometry(groups=(GROUP,), num_blocks=(POOL,))
BLOCK_BYTES = GROUP.block_bytes
PEER = Peer("D", "d")
T = TypeVar("T")


class Wire:
    """Carries out a session's acts by hand: nothing ends before the test says so."""

    def __init__(self, **options: Any) -> None:
        self.session = WriterSession(GEOMETRY, SessionOptions(**options))
        self.now_s = 100.0
        self.told: list[Any] = []
        self.on_wire: dict[int, Item] = {}
        self.submitted: list[Item] = []
        self.hashes: list[Item] = []
        self.links: list[str] = []  # open, close, fenced
        self.most_on_wire = 0
        self.step = 0

    def act(self) -> None:
        self.session.pump(self.now_s)
        for action in self.session.take_actions():
            match action:
                case acts.Submit():
                    self.submitted += action.items
                    self.on_wire.update((i.number, i) for i in action.items)
                    self.most_on_wire = max(self.most_on_wire, len(self.on_wire))
                case acts.Hash():
                    self.hashes += action.items
                case acts.Tell():
                    self.told.append(action.message)
                case acts.OpenLink():
                    self.links.append("open")
                case acts.CloseLink():
                    self.links.append("close")
                case acts.LinkFenced():
                    self.links.append("fenced")

    def source(self, block_ids: Iterable[int], ready_blocks: int = 0) -> None:
        message = m.OpenSource(seq_id="s", block_ids=tuple(block_ids), ready_blocks=ready_blocks)
        self.session.open_source(message, self.now_s)

    def grant(self, block_ids: Iterable[int], skip_blocks: int = 0, ticket_id: str = "t", segment: str = "x") -> None:
        message = m.OpenTicket(
            ticket_id=ticket_id,
            seq_id="s",
            worker_id=PEER.worker_id,
            epoch=PEER.epoch,
            segment=segment,
            geometry=GEOMETRY.to_dict(),
            block_ids=tuple(block_ids),
            skip_blocks=skip_blocks,
        )
        self.session.open_ticket(message, self.now_s)
        self.act()

    def begin(self, first: int, count: int) -> None:
        self.step += 1
        self.session.on_progress(StepBegins(self.step, (Chunk("s", first, count, False),)), self.now_s)

    def layer(self, layer: int) -> None:
        self.session.on_progress(LayersDone(self.step, layer, (self.now_s,)), self.now_s)
        self.act()

    def end(self) -> None:
        self.session.on_progress(StepEnds(self.step, self.now_s), self.now_s)
        self.act()

    def compute(self, first: int, count: int) -> None:
        self.begin(first, count)
        for layer in range(LAYERS):
            self.layer(layer)
        self.end()

    def connect(self) -> None:
        self.session.on_connected(PEER)
        self.act()

    def complete(self, state: WriteState = WriteState.DONE, count: int = 1 << 30) -> None:
        numbers = list(self.on_wire)[:count]
        for number in numbers:
            del self.on_wire[number]
        self.session.on_results(PEER, dict.fromkeys(numbers, state), self.now_s)
        self.act()

    def hash_all(self) -> None:
        hashes, self.hashes = self.hashes, []
        self.session.on_hashed([(i, 1000 + i.number) for i in hashes])
        self.act()

    def finish(self) -> None:
        """Let everything end well."""
        while self.on_wire or self.hashes:
            self.complete()
            self.hash_all()

    def closed(self, is_confirmed: bool = True) -> None:
        self.on_wire.clear()
        self.session.on_closed(PEER, is_confirmed)
        self.act()

    def close_ticket(self, ticket_id: str = "t") -> None:
        self.session.close_ticket(m.CloseTicket(ticket_id=ticket_id), self.now_s)
        self.act()

    def fence(self, *, forget: bool = False) -> None:
        self.session.fence(m.Fence(worker_id=PEER.worker_id, epoch=PEER.epoch, forget=forget), self.now_s)
        self.act()

    def of(self, kind: type[T]) -> list[T]:
        return [x for x in self.told if isinstance(x, kind)]

    def sent(self) -> list[tuple[int, int]]:
        """(layer, source block) of every block submitted, in order."""
        return [(i.run.layer, i.run.source_block + n) for i in self.submitted for n in range(i.run.count)]
