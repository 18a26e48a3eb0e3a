"""The index behind ACL users, TLS, sentinels and in a cluster: real servers, on loopback."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.cluster import RedisCluster

from kvstore.errors import ConfigError, IndexUnavailable
from kvstore.index.address import StoreAddress
from kvstore.index.base import EventBatch, Snapshot, WorkerRecord
from kvstore.index.connect import connect, disconnect
from kvstore.index.redis import RedisIndex
from services.config import RedisConfig, ServeConfig
from services.doctor.stores import check_redis
from tests.stores import Server, Wire, make_certificate, make_cluster, stopping

RIGHTS = "resetkeys ~pdray:* resetchannels -@all +@read +@write +@connection +eval +evalsha +time +command"
USER = f"user pdray on >secret {RIGHTS} +cluster|slots +cluster|shards"
NAMES = [bytes([n]) * 16 for n in range(1, 9)]
ME = ("w 1", "e/1")


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def use_everything(writer: RedisIndex, reader: RedisIndex, workers: int = 6) -> None:
    """Each verb, by several workers, as the contract has it."""
    them = [(f"worker {i}", f"e{i}") for i in range(workers)]
    for i, (worker_id, epoch) in enumerate(them):
        await writer.announce(WorkerRecord(worker_id, epoch, b"signed"), b"load %d" % i)
        await writer.publish(worker_id, epoch, NAMES[:4], [])
        await writer.publish(worker_id, epoch, [], NAMES[3:4])
        assert await writer.holds(worker_id, epoch)
    assert [r.worker_id for r in await reader.workers()] == [worker_id for worker_id, _ in them]
    assert await reader.load("worker 1") == b"load 1"
    assert await reader.snapshot(*them[0]) == Snapshot(2, frozenset(NAMES[:3]))
    batches: list[EventBatch] = []
    cursors = dict.fromkeys(them, 0)
    while found := await reader.read(cursors, 0.05):
        batches += found
        cursors |= {(b.worker_id, b.epoch): b.seq for b in found}
    assert sorted((b.worker_id, b.seq) for b in batches) == [(w, seq) for w, _ in them for seq in (1, 2)]
    waiting = asyncio.create_task(reader.read(cursors, 20.0))
    await asyncio.sleep(0.1)
    await writer.clear(*them[2])
    assert await waiting == [EventBatch(*them[2], 3, (), (), cleared=True)]
    await writer.announce(WorkerRecord("worker 0", "later", b"signed"), b"")  # takes over
    assert await reader.snapshot(*them[0]) == Snapshot(0, frozenset())
    await writer.withdraw(*them[1])
    assert "worker 1" not in [r.worker_id for r in await reader.workers()]
    assert await reader.ping()


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., RedisIndex]]:
    made: list[RedisIndex] = []

    def make(address: StoreAddress | str, **options: Any) -> RedisIndex:
        made.append(RedisIndex(address, "ns", 15.0, **options))
        return made[-1]

    yield make
    for index in made:
        await index.close()


async def test_a_user_with_the_documented_rights_can_do_everything(
    tmp_path: Path, opened: Callable[..., RedisIndex]
) -> None:
    server = Server(tmp_path, "user default off", USER)
    with stopping(server):
        await server.start(username="pdray", password="secret")
        address = StoreAddress(url=f"redis://{server.place}/0", username="pdray", password="secret")
        await use_everything(opened(address), opened(f"redis://pdray:secret@{server.place}/0"))
        assert "secret" not in repr(address)
        for wrong in (
            StoreAddress(url=f"redis://{server.place}"),
            StoreAddress(url=f"redis://pdray:secret@{server.place}", password="other"),
        ):
            assert not await opened(wrong).ping()
            with pytest.raises(IndexUnavailable):
                await opened(wrong).workers()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls_is_checked_against_the_given_ca(tmp_path: Path, opened: Callable[..., RedisIndex]) -> None:
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = Server(tmp_path, "requirepass secret")
    wire = Wire(server.port, context)
    with stopping(server):
        await server.start(password="secret")
        await wire.start()
        url = f"rediss://127.0.0.1:{wire.port}/0"
        try:
            ours = StoreAddress(url=url, password="secret", ca_file=str(cert))
            await use_everything(opened(ours), opened(ours), workers=3)
            assert not await opened(StoreAddress(url=url, password="secret")).ping()  # the system's CAs did not sign it
            config = ServeConfig(redis=RedisConfig(url=url, password="secret", ca_file=str(cert)))
            (found,) = await asyncio.to_thread(check_redis, config)
            assert (found.level, found.finding) == ("ok", f"{url} answers")
        finally:
            await wire.stop()


async def test_a_cluster_keeps_each_workers_keys_in_one_slot(tmp_path: Path, opened: Callable[..., RedisIndex]) -> None:
    servers = await make_cluster(tmp_path, 3, "requirepass secret", password="secret")
    with stopping(*servers):
        url = "redis://" + ",".join(s.place for s in servers[:2])
        address = StoreAddress(url=url, topology="cluster", password="secret")
        await use_everything(opened(address), opened(address), workers=8)
        client: RedisCluster = connect(address, 1.0)
        slots: dict[str, set[int]] = {}
        async for key in client.scan_iter():
            kind, _, rest = key.decode().removeprefix("pdray:ns:").partition(":")
            if kind != "workers":
                slots.setdefault(rest.partition("}")[0], set()).add(client.keyslot(key))
        assert {len(of_worker) for of_worker in slots.values()} == {1}
        assert len({min(of_worker) for of_worker in slots.values()}) > 3
        await client.set("pdray:ns:events:{w%201}:e%2F1", "no stream")
        reader = opened(address)
        assert await reader.read({ME: 0}, 0.0) == []
        assert reader.ignored == 1
        await disconnect(client)
        config = ServeConfig(redis=RedisConfig(url=url, topology="cluster", password="secret"))
        (found,) = await asyncio.to_thread(check_redis, config)
        assert (found.level, found.finding) == ("ok", f"cluster {url} answers")
        writer = opened(address)
        for server in servers:
            server.stop()
        with pytest.raises(IndexUnavailable):
            await writer.workers()
        for server in servers:
            await server.start(password="secret")
        await until(writer.ping)
        await until(lambda: _takes(writer))


async def _takes(index: RedisIndex) -> bool:
    try:
        await index.clear(*ME)
        await index.publish(*ME, NAMES, [])
    except IndexUnavailable:
        return False
    return True


@pytest.mark.slow
async def test_a_failover_by_sentinels_is_followed(tmp_path: Path, opened: Callable[..., RedisIndex]) -> None:
    user = (USER, "masteruser replica", "masterauth r3plica", "user replica on >r3plica +psync +replconf +ping")
    admin = ("user default on >admin ~* &* +@all", "repl-diskless-sync-delay 0")
    primary = Server(tmp_path, *user, *admin)
    second = Server(tmp_path, *user, *admin, f"replicaof 127.0.0.1 {primary.port}")
    lines = (
        f"sentinel monitor main 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds main 500",
        "sentinel failover-timeout main 3000",
        "sentinel auth-user main default",
        "sentinel auth-pass main admin",
        "requirepass s3ntinel",
    )
    sentinel = Server(tmp_path, *lines, is_sentinel=True)
    with stopping(primary, second, sentinel):
        await primary.start(password="admin")
        await second.start(password="admin")
        async with second.client(password="admin") as client:
            await until(lambda: _is_linked(client))
        await sentinel.start(password="s3ntinel")
        async with sentinel.client(password="s3ntinel") as client:
            await until(lambda: _knows_replica(client))
        address = StoreAddress(
            url=f"redis://{sentinel.place}",
            topology="sentinel",
            service="main",
            username="pdray",
            password="secret",
            sentinel_password="s3ntinel",
        )
        writer, reader = opened(address), opened(address)
        await use_everything(writer, reader, workers=3)
        await writer.publish(*ME, NAMES, [])
        primary.stop()
        with pytest.raises(IndexUnavailable):
            await writer.publish(*ME, NAMES[:1], [])
        await until(lambda: _takes(writer))
        assert (await reader.snapshot(*ME)).names == frozenset(NAMES)
        await primary.start(password="admin")  # as a primary that the sentinel soon makes a replica
        await until(lambda: _takes(writer))
        assert (await reader.snapshot(*ME)).names == frozenset(NAMES)


async def _is_linked(client: Any) -> bool:
    return bool((await client.info("replication"))["master_link_status"] == "up")


async def _knows_replica(client: Any) -> bool:
    return len(await client.execute_command("SENTINEL", "REPLICAS", "main")) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topology": "ring"}, "redis.topology must be one of standalone, sentinel, cluster, got 'ring'"),
        ({"topology": "cluster"}, "redis.url must name the hosts of redis.topology=cluster"),
        ({"url": "redis://h", "ca_file": "ca.pem"}, "redis.ca_file needs redis.url to begin with rediss://"),
        ({"url": "rediss://h", "cert_file": "c.pem"}, "redis.key_file goes together with redis.cert_file"),
        ({"url": "redis://h", "topology": "sentinel", "service": ""}, "redis.service must not be empty"),
        ({"max_blocks": 0}, "redis.max_blocks must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisConfig(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("url", "topology", "message"),
    [
        ("redis://a:1,b:2", "standalone", "names 2 hosts, a standalone server has one"),
        ("redis://a:1,", "cluster", "has an empty host"),
        ("redis://a:port", "standalone", "port"),
        ("smoke://a", "standalone", "redis://, rediss://, unix://"),
        ("unix:///run/store.sock", "cluster", "a cluster is reached by hosts"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused(url: str, topology: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(StoreAddress(url=url, topology=topology), 1.0)
