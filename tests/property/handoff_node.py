"""One simulated worker: a real role, engine, scheduler and pool around a model that only writes down what it computed.

The model puts into each block a tag of the tokens that it stands for, and looks at these tags before it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.blocks import namespace_root
from kvstore.geometry import LAYOUT_VERSION, KVGeometry, KVGroup
from kvstore.pool import BlockPool
from kvstore.transfer.progress import Chunk, LayersDone, StepBegins, StepEnds
from services.decode.reader import Reader
from services.engine import messages as m
from services.engine.core import Engine
from services.engine.draws import Taken
from services.engine.intake import Limits
from services.engine.runner import Executed, tally_of
from services.engine.scheduler import Scheduler
from services.engine.sequence import Phase, Work
from services.prefill.writer import Writer
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from tests.property.handoff_wire import Memory, Transfers, is_quarantined

if TYPE_CHECKING:
    from tests.property.handoff_world import HandoffWorld

BLOCK, LAYERS, POOL = 4, 2, 14
GROUP = KVGroup(num_layers=LAYERS, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="float16")
GEOMETRY = KVGeometry(groups=(GROUP,), num_blocks=(POOL,))
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="float16", block_size=BLOCK, layout_version=1)
ROUTER = ("router", "r1")
STEP_S = 0.02


def tag(layer: int, tokens: Sequence[int]) -> int:
    """What a block holds in one layer when its last token is the last of these."""
    return hash((layer, *tokens)) & 0xFFFFFFFF


class FakeModel:
    """A runner that computes nothing: next token = sum of all tokens."""

    grammars = None

    def __init__(self, node: Node) -> None:
        self._node = node

    def execute(self, work: Sequence[Work], on_layer: Any = None) -> Executed:
        for layer in range(LAYERS):
            for item in work:
                self._compute(item, layer)
            if on_layer is not None:
                on_layer(layer)
        tokens = {key: sum(w.sequence.token_ids) % 50 for w in work for key, _ in w.draws}
        return Executed(Taken(tokens=tokens), tally_of(work, sum(w.count for w in work)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for layer in range(LAYERS):
                self._node.memory[(layer, target)] = self._node.memory[(layer, source)]

    def _compute(self, item: Work, layer: int) -> None:
        seq, memory = item.sequence, self._node.memory
        for i, block in enumerate(seq.block_ids):
            known = seq.token_ids[: min((i + 1) * BLOCK, item.start)]
            if i * BLOCK < item.start and memory.get((layer, block)) != tag(layer, known):
                text = f"{self._node.name} computes {seq.seq_id} at {item.start}, and block {i} holds something else"
                self._node.world.violate(text)
            if i * BLOCK < item.stop and (i + 1) * BLOCK > item.start:
                memory[(layer, block)] = tag(layer, seq.token_ids[: min((i + 1) * BLOCK, item.stop)])


class Progress:
    def __init__(self, node: Node) -> None:
        self._node = node

    def begin(self, step: int, chunks: Sequence[Chunk]) -> None:
        self._node.transfers.on_progress(StepBegins(step, tuple(chunks)))

    def layer(self, step: int, layer: int, at_s: float) -> None:
        self._node.transfers.on_progress(LayersDone(step, layer, (at_s,)))

    def end(self, step: int, at_s: float) -> None:
        self._node.transfers.on_progress(StepEnds(step, at_s))


class Node:
    """One worker; `crash` and `start` make a new process of it, with a new epoch and empty memory."""

    def __init__(self, world: HandoffWorld, role: str, name: str) -> None:
        self.world, self.role, self.name = world, role, name
        self.starts = 0
        self.is_alive = False
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.epoch = f"{self.name}-{self.starts}"
        self.is_alive = True
        self.memory: Memory = {}
        self.pool = BlockPool(POOL)
        limits = Limits(POOL, BLOCK, 1024, 100)
        clock = self.world.loop.time
        scheduler = Scheduler(self.pool, limits, max_num_batched_tokens=BLOCK * 2, max_num_seqs=8)
        ticks = itertools.count()
        self.engine = Engine(
            scheduler, FakeModel(self), send=self._from_engine,  # type: ignore[arg-type]
            clock=lambda: clock() + next(ticks) * 1e-6, progress=Progress(self),  # no step takes no time at all
        )  # fmt: skip
        fingerprint = worker_pb2.Fingerprint(
            model="m", tokenizer="t", dtype="float16", block_size=BLOCK, layout_version=LAYOUT_VERSION,
            geometry_json=json.dumps(GEOMETRY.to_dict()),
        )  # fmt: skip
        registration = worker_pb2.Registration(
            worker_id=self.name, role=self.role, epoch=self.epoch, address=self.name, transport="tcp",
            max_model_len=1024, fingerprint=fingerprint,
        )  # fmt: skip
        self.core = WorkerCore(self.world.config, registration, self._make_role, clock)
        self.core.role._peers.stub = lambda address, _epoch: self.world.stub(self, address)  # type: ignore[attr-defined]
        self.transfers = Transfers(self.world, self, GEOMETRY)
        self.core.send_engine = self._to_engine
        self.core.send_transfer = self.transfers.handle
        self.core.kill_transfer = self.kill_transfer
        self.started: list[str] = []  # sequences whose KV was committed here
        self._wake = asyncio.Event()
        self._tasks = [asyncio.ensure_future(x) for x in (self._steps(), self._sweep(), self._attend())]
        for task in self._tasks:
            task.add_done_callback(self._task_done)

    def crash(self) -> None:
        self.transfers.die()
        self.is_alive = False
        self.core.send_engine = self.core.send_transfer = lambda _message: None
        self.world.loop.create_task(self.core.stop())
        for task in self._tasks:
            task.cancel()

    def kill_transfer(self) -> None:
        """The process ends, its parent notices, and starts another one."""
        if self.is_alive and self.transfers.is_alive:
            self.transfers.die()
            self.world.loop.call_later(0.05, self._transfer_lost, self.transfers)

    def takes(self, owner: str, block: int) -> bool:
        """Whether a peer may write this block now: it waits for the KV of this sequence, or for a fence."""
        seq = self.engine.scheduler.roster.sequences.get(owner)
        if seq is not None and seq.phase in (Phase.RESERVED, Phase.LOADING) and block in seq.block_ids:
            return seq.block_ids.index(block) >= seq.num_named_blocks
        return is_quarantined(self.pool, block)

    def tell(self, message: Any) -> None:
        if self.is_alive:
            self.core.role.on_transfer(message)

    def _make_role(self, core: WorkerCore) -> Any:
        return Writer(core) if self.role == "prefill" else Reader(core, takes_prompts=False)

    def _transfer_lost(self, ended: Transfers) -> None:
        if self.is_alive and self.transfers is ended:
            self.core.send_transfer = lambda _message: None
            self.core.transfer_up.clear()
            self.core.role.on_transfer_lost()
            self.world.loop.call_later(self.world.rng.uniform(0.1, 1.5), self._transfer_back, ended)

    def _transfer_back(self, ended: Transfers) -> None:
        if self.is_alive and self.transfers is ended:
            self.transfers = Transfers(self.world, self, GEOMETRY)
            self.core.send_transfer = self.transfers.handle
            self.core.role.on_transfer_restarted()
            self.core.transfer_up.set()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self.is_alive:
            self.world.violate(f"{self.name} lost a loop: {task.exception()!r}")

    def _to_engine(self, message: Any) -> None:
        if isinstance(message, m.StartSequence):
            if message.seq_id in self.started:
                self.world.violate(f"{message.seq_id} is committed twice on {self.name}")
            self.started.append(message.seq_id)
            self.world.commits += 1
        self.engine.handle(message)
        self._wake.set()

    def _from_engine(self, message: Any) -> None:
        def arrive() -> None:
            if self.is_alive:
                self.core.on_engine(message)

        self.world.loop.call_soon(arrive)

    async def _steps(self) -> None:
        while True:
            if not self.engine.advance():
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(STEP_S)

    async def _sweep(self) -> None:
        while True:
            await self.core.sweep()
            await asyncio.sleep(0.5)

    async def _attend(self) -> None:
        """The router's stream; it acknowledges everything at once."""
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def acknowledge() -> AsyncIterator[worker_pb2.RouterMessage]:
            last = 0
            while True:
                yield worker_pb2.RouterMessage(router_id=ROUTER[0], router_epoch=ROUTER[1], last_seq=last)
                last = await seen.get()

        async for message in self.core.hub.serve(acknowledge()):
            self.world.on_router_message(self, message)
            if message.seq:
                seen.put_nowait(message.seq)

    def check(self) -> None:
        self.engine.scheduler.roster.check()
        leases = self.core.role._outbox.leases  # type: ignore[attr-defined]
        assert {peer for peer, tickets in leases._tickets.items() if tickets} <= leases._loops.keys(), (
            "no lease is renewed"
        )
        counts = self.pool.counts()
        parts = (counts.free, counts.used, counts.cached, counts.reserved, counts.quarantined)
        assert sum(parts) == counts.total, f"{self.name}: {counts}"

    def leftovers(self) -> dict[str, Any]:
        """What an idle worker still holds; empty where it holds nothing but its cache."""
        counts, role = self.pool.counts(), self.core.role
        found: dict[str, Any] = {
            "blocks": counts.total - counts.free - counts.cached,
            "requests": len(self.core.requests),
            "inbound": dict(role._inbox.tickets),  # type: ignore[attr-defined]
            "outbound": dict(role._outbox.tickets),  # type: ignore[attr-defined]
            "loans": dict(role._lender._loans),  # type: ignore[attr-defined]
            "pulls": dict(role._puller._pulls),  # type: ignore[attr-defined]
            "quarantines": dict(role._quarantines._waits),  # type: ignore[attr-defined]
            "sources": dict(self.transfers.session._sources),
            "pushes": dict(self.transfers.session._tickets),
        }
        leases = role._outbox.leases._tickets.items()  # type: ignore[attr-defined]
        writers = role._inbox.writers._writers.items()  # type: ignore[attr-defined]
        found["leases"] = {k: tickets for k, tickets in leases if tickets}
        found["writers"] = {k: w for k, w in writers if w.quarantined or w.tickets or w.fencing}
        found["sequences"] = dict(role._handoffs if self.role == "prefill" else role._by_sequence)  # type: ignore[attr-defined]
        return {k: v for k, v in found.items() if v}
