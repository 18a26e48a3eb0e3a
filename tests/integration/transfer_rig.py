"""Real transfer processes with real memory, and a test in the place of the engine and of the service process."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer import messages as m
from kvstore.transfer.client import TransferClient
from kvstore.transfer.progress import Chunk, ProgressSender
from services.config import TransferConfig, set_mooncake_environment

WAIT_S = 30.0
SECRET = "a secret for tests"

T = TypeVar("T")


def smollm_geometry(num_blocks: int) -> KVGeometry:
    """30 layers of 12,288 bytes a block, as SmolLM2-135M in bfloat16 has."""
    group = KVGroup(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    return KVGeometry(groups=(group,), num_blocks=(num_blocks,))


class Side:
    """One worker's memory and its transfer process."""

    def __init__(self, worker_id: str, num_blocks: int = 128) -> None:
        self.worker_id = worker_id
        self.epoch = f"{worker_id}-epoch"
        self.geometry = smollm_geometry(num_blocks)
        self.fd = os.memfd_create(worker_id)
        os.ftruncate(self.fd, self.geometry.total_bytes)
        self.memory = mmap.mmap(self.fd, self.geometry.total_bytes)
        self.client = TransferClient()
        self.messages: list[Any] = []
        self.exit_code: int | None = None
        self._news = asyncio.Event()
        engine_end, process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process_end = process_end
        self.progress = ProgressSender(engine_end.detach(), self.geometry.groups[0].num_layers, group_s=0.0)

    async def start(self, transport: str, secret: str = SECRET, **options: Any) -> m.Started:
        fields: dict[str, Any] = {
            "geometry": self.geometry.to_dict(),
            "transport": transport,
            "protocol": "tcp",
            "device": "",
            "host": "127.0.0.1",
            "secret": secret,
            "digests": True,
            "layerwise": True,
            "max_outstanding": 64,
            "fence_after_ms": 500,
            "throttle_bytes_per_s": 0,
        }
        env: dict[str, str] = {}
        set_mooncake_environment(TransferConfig(), env)
        env.setdefault("MC_TCP_LANES_PER_PEER", "4")
        env.setdefault("MC_HANDSHAKE_CONNECT_TIMEOUT", "5")
        return await self.client.start(
            self.fd,
            self._process_end.fileno(),
            m.Start(**{**fields, **options}),
            self._on_message,
            self._on_exit,
            env,
        )

    def _on_message(self, message: Any) -> None:
        self.messages.append(message)
        self._news.set()

    def _on_exit(self, code: int) -> None:
        self.exit_code = code
        self._news.set()

    async def wait(self, kind: type[T], test: Callable[[T], bool] = lambda _: True) -> T:
        """The first message of that kind that passes the test, taken out of the list; waits for it with a bound."""
        found: list[T] = []

        def take() -> bool:
            for message in self.messages:
                if isinstance(message, kind) and test(message):
                    self.messages.remove(message)
                    found.append(message)
                    return True
            return False

        await self.until(take, f"no {kind.__name__} among {[type(x).__name__ for x in self.messages]}")
        return found[0]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, what
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 0.02)
            except TimeoutError:
                continue

    def span(self, layer: int, block: int) -> slice:
        start = self.geometry.offset(0, layer, block)
        return slice(start, start + self.geometry.groups[0].block_bytes)

    def block(self, layer: int, block: int) -> bytes:
        return self.memory[self.span(layer, block)]

    def fill(self, block_ids: tuple[int, ...], layer: int, first: int, count: int) -> None:
        """Compute: the engine's place."""
        for block in block_ids[first : first + count]:
            self.memory[self.span(layer, block)] = os.urandom(self.geometry.groups[0].block_bytes)

    async def stop(self) -> None:
        await self.client.stop()
        self.progress._socket.close()
        self._process_end.close()
        self.memory.close()
        os.close(self.fd)


class Pair:
    """A writer, a reader, and a prompt of ``num_blocks`` blocks that lies scattered on both."""

    def __init__(self, num_blocks: int = 94) -> None:
        self.writer, self.reader = Side("P"), Side("D")
        self.num_blocks = num_blocks
        self.num_layers = self.writer.geometry.groups[0].num_layers
        self.source_ids = tuple(range(3, 3 + num_blocks // 2)) + tuple(range(70, 70 + num_blocks - num_blocks // 2))
        self.target_ids = tuple(range(120, 120 - num_blocks // 3, -1)) + tuple(range(num_blocks - num_blocks // 3))
        self.step = 0

    async def start(self, transport: str, **options: Any) -> None:
        await asyncio.gather(self.writer.start(transport, **options), self.reader.start(transport, **options))

    async def listen(self) -> str:
        self.reader.client.send(m.OpenListener(worker_id="P", epoch=self.writer.epoch))
        ready = await self.reader.wait(m.ListenerReady)
        assert not ready.error, ready.error
        return ready.segment

    def open_source(self, ready_blocks: int = 0, seq_id: str = "s") -> None:
        self.writer.client.send(m.OpenSource(seq_id=seq_id, block_ids=self.source_ids, ready_blocks=ready_blocks))

    def allow(self, ticket_id: str = "t") -> None:
        self.reader.client.send(m.Allow(ticket_id=ticket_id, worker_id="P", epoch=self.writer.epoch))

    def ticket(self, segment: str, ticket_id: str = "t", skip_blocks: int = 0, epoch: str = "") -> m.OpenTicket:
        return m.OpenTicket(
            ticket_id=ticket_id,
            seq_id="s",
            worker_id="D",
            epoch=epoch or self.reader.epoch,
            segment=segment,
            geometry=self.reader.geometry.to_dict(),
            block_ids=self.target_ids,
            skip_blocks=skip_blocks,
        )

    def grant(self, segment: str, ticket_id: str = "t", skip_blocks: int = 0) -> None:
        self.writer.client.send(self.ticket(segment, ticket_id, skip_blocks))

    def begin_chunk(self, first: int, count: int, seq_id: str = "s") -> int:
        self.step += 1
        is_last = first + count == self.num_blocks
        self.writer.progress.begin(self.step, [Chunk(seq_id, first, count, is_last)])
        return self.step

    def compute_layer(self, layer: int, first: int, count: int) -> None:
        self.writer.fill(self.source_ids, layer, first, count)
        self.writer.progress.layer(self.step, layer, time.monotonic())

    def end_chunk(self) -> None:
        self.writer.progress.end(self.step, time.monotonic())

    def compute(self, first: int, count: int) -> None:
        """One whole chunk."""
        self.begin_chunk(first, count)
        for layer in range(self.num_layers):
            self.compute_layer(layer, first, count)
        self.end_chunk()

    def differing_blocks(self, first: int = 0) -> list[tuple[int, int]]:
        """(layer, index) of the blocks that are not equal on both sides."""
        return [
            (layer, index)
            for layer in range(self.num_layers)
            for index in range(first, self.num_blocks)
            if self.writer.block(layer, self.source_ids[index]) != self.reader.block(layer, self.target_ids[index])
        ]

    async def stop(self) -> None:
        await asyncio.gather(self.writer.stop(), self.reader.stop())
