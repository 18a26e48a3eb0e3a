"""The store loses its data, stops, hangs, refuses and fails over, while requests come all the time: all are answered.

Real Valkey, real publishers, real gRPC, the router's real core; only the engines are fakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.blocks import block_names
from kvstore.index.address import StoreAddress
from kvstore.index.base import WorkerRecord
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.redis import RedisIndex
from services.config import RedisConfig, ServeConfig, WorkerConfig
from services.protocol.errors import RequestError
from services.router.core import RouterCore
from services.router.types import RouterRequest, SamplingSpec, new_request_id
from services.worker.publisher import Publisher
from tests.fake_worker import CARD, SECRET, Cluster, token
from tests.stores import Server, Wire, stopping

EVERY_S = 0.05
"""Between two requests."""
HEARTBEAT_S = 1.0
WORKERS = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"))


async def until(condition: Callable[[], Any], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


class CountingIndex(RedisIndex):
    """Counts the heartbeats that the store took."""

    heartbeats = 0

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        await super().announce(record, load)
        self.heartbeats += 1


class Rig:
    """Three workers that publish, a router that reads, and requests that come all the time."""

    def __init__(self, cluster: Cluster, address: StoreAddress) -> None:
        self._cluster = cluster
        self._address = address
        self._stack = contextlib.AsyncExitStack()
        self._held: dict[str, int] = dict.fromkeys([w for w, _ in WORKERS], 0)
        self._indexes: dict[str, CountingIndex] = {}
        self._publishers: dict[str, Publisher] = {}
        self._asking: asyncio.Task[None] | None = None
        self.core: RouterCore
        self.answered = 0
        self.failed: list[str] = []

    async def __aenter__(self) -> Rig:
        for worker_id, role in WORKERS:
            worker = await self._cluster.add(worker_id, role)
            index = self._indexes[worker_id] = CountingIndex(self._address, "ns", 15.0)
            publisher = Publisher(index, lambda w=worker: w.registration, lambda w=worker: w.load, HEARTBEAT_S)
            self._publishers[worker_id] = publisher
            publisher.start()
        redis = RedisConfig(url=self._address.url, topology=self._address.topology, ttl_s=15.0, heartbeat_s=HEARTBEAT_S)
        settings = ServeConfig(secret=SECRET, worker=WorkerConfig(stall_s=4.0), redis=redis)
        settings = dataclasses.replace(settings, workers=tuple(self._cluster.addresses))
        reader = RedisIndex(self._address, "ns", 15.0)
        self._stack.push_async_callback(reader.close)
        self.core = RouterCore(settings, CARD, index=reader)
        await self.core.start()
        await until(lambda: len(self.core.view.candidates(())) == 3)
        self._asking = asyncio.create_task(self._ask_always())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asking is not None
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        for publisher in self._publishers.values():
            await publisher.stop()
        await self.core.stop()
        await self._stack.aclose()
        for index in self._indexes.values():
            await index.close()

    def store_more(self, blocks: int = 20) -> None:
        """Each worker stores a new prompt of so many blocks."""
        for worker_id, publisher in self._publishers.items():
            first = self._held[worker_id] + 1
            publisher.note(block_names([first] * 16 * blocks, 16, worker_id.encode().ljust(16)), [])
            self._held[worker_id] += blocks

    def is_whole(self) -> bool:
        """The router knows every block that its workers hold."""
        entries = {e.worker_id: e for e in self.core.view.entries()}
        return all(len(entries[w].residency) == held for w, held in self._held.items())

    @property
    def heartbeats(self) -> int:
        """Of the worker that sent the most."""
        return max(index.heartbeats for index in self._indexes.values())

    @property
    def mode(self) -> str:
        registry = self.core.metrics.registry
        modes = {
            s.labels["pdray_index_mode"]: s.value
            for m in registry.collect()
            for s in m.samples
            if s.name == "pdray_index_mode"
        }
        (mode,) = [name for name, value in modes.items() if value]
        return mode

    async def more_answers(self, count: int = 20) -> None:
        """So many more requests end, and all of them well."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted or self.failed, 30 + 4 * count * EVERY_S)
        assert self.failed == []

    async def _ask_always(self) -> None:
        async with asyncio.TaskGroup() as group:
            number = 0
            while True:
                number += 1
                group.create_task(self._ask(number))
                await asyncio.sleep(EVERY_S)

    async def _ask(self, number: int) -> None:
        asked = RouterRequest(
            request_id=new_request_id(),
            prompt_ids=tuple([number % 7] * 100),
            sampling=SamplingSpec(max_tokens=3, temperature=0.0),
            received_s=time.monotonic(),
        )
        try:
            tokens = [t async for event in self.core.flow.stream(asked) for t in event.token_ids]
        except RequestError as error:
            self.failed.append(repr(error))
            return
        if tokens != [token(i) for i in range(3)]:
            self.failed.append(repr(tokens))
        self.answered += 1


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    made = EmbeddedValkey()
    await made.start(tmp_path)
    yield made
    await made.stop()


async def test_a_store_that_loses_all_its_data_under_load_is_filled_again(
    cluster: Cluster, server: EmbeddedValkey
) -> None:
    from redis.asyncio import Redis

    async with Rig(cluster, StoreAddress(url=server.url)) as rig, Redis.from_url(server.url) as client:
        rig.store_more()
        await until(rig.is_whole)
        assert rig.mode == "standalone"
        for _ in range(3):
            await client.flushall()
            before = rig.heartbeats
            rig.store_more()
            assert not rig.is_whole()
            await rig.more_answers(5)
            await until(rig.is_whole)
            assert rig.heartbeats - before <= 2
        assert rig.failed == []
        assert {e.worker_id for e in rig.core.view.entries()} == {w for w, _ in WORKERS}


@pytest.mark.parametrize("stopped_s", [1.5, pytest.param(30.0, marks=pytest.mark.slow)])
async def test_a_store_that_stops_is_done_without(
    cluster: Cluster, server: EmbeddedValkey, tmp_path: Path, stopped_s: float
) -> None:
    async with Rig(cluster, StoreAddress(url=server.url)) as rig:
        rig.store_more()
        await until(rig.is_whole)
        await server.stop()
        rig.store_more()
        await until(lambda: rig.mode == "down")
        await rig.more_answers(int(stopped_s / EVERY_S))
        await server.start(tmp_path)
        before = rig.heartbeats
        await until(rig.is_whole)
        assert rig.heartbeats - before <= 2
        await until(lambda: rig.mode == "standalone")
        await rig.more_answers(5)


@pytest.mark.slow
async def test_a_store_that_answers_after_two_seconds_holds_up_nobody(cluster: Cluster, server: EmbeddedValkey) -> None:
    wire = Wire(int(server.url.rpartition(":")[2].partition("/")[0]))
    await wire.start()
    url = server.url.replace(f":{wire.target_port}/", f":{wire.port}/")
    try:
        async with Rig(cluster, StoreAddress(url=url)) as rig:
            rig.store_more()
            await until(rig.is_whole)
            wire.delay_s = 2.0
            rig.store_more()
            await until(lambda: rig.mode == "down")
            await rig.more_answers(40)
            wire.delay_s = 0.0
            await until(rig.is_whole)
            await until(lambda: rig.mode == "standalone")
            await rig.more_answers(5)
    finally:
        await wire.stop()


async def test_with_a_wrong_password_the_router_serves_by_its_other_sources(
    cluster: Cluster, server: EmbeddedValkey
) -> None:
    async with Rig(cluster, StoreAddress(url=server.url, password="wrong")) as rig:
        rig.store_more()
        await rig.more_answers(20)
        assert rig.mode == "down"
        assert rig.core.redis_mode == "down"
        assert rig.core.ready() == (True, "")


@pytest.mark.slow
async def test_the_view_is_whole_again_after_the_primary_failed_over(cluster: Cluster, tmp_path: Path) -> None:
    primary = Server(tmp_path)
    second = Server(tmp_path, f"replicaof 127.0.0.1 {primary.port}", "repl-diskless-sync-delay 0")
    lines = (
        f"sentinel monitor main 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds main 500",
        "sentinel failover-timeout main 3000",
    )
    sentinel = Server(tmp_path, *lines, is_sentinel=True)
    with stopping(primary, second, sentinel):
        for server in (primary, second):
            await server.start()
        async with second.client() as client:
            await _until(lambda: _is_linked(client))
        await sentinel.start()
        async with sentinel.client() as client:
            await _until(lambda: _knows_replica(client))
        address = StoreAddress(url=f"redis://{sentinel.place}", topology="sentinel", service="main")
        async with Rig(cluster, address) as rig:
            rig.store_more()
            await until(rig.is_whole)
            assert rig.mode == "sentinel"
            primary.stop()
            rig.store_more()
            await until(lambda: rig.mode == "down")
            await rig.more_answers(20)
            await until(rig.is_whole, 60.0)
            await until(lambda: rig.mode == "sentinel")
            await rig.more_answers(5)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.05)


async def _is_linked(client: Any) -> bool:
    return bool((await client.info("replication"))["master_link_status"] == "up")


async def _knows_replica(client: Any) -> bool:
    return len(await client.execute_command("SENTINEL", "REPLICAS", "main")) == 1
