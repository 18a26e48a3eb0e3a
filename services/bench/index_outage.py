"""What the store's failures add to the time to the first token: ``python -m services.bench.index_outage``.

A router process with a real Valkey behind it, and a paced worker (`services.bench.paced`) for which this process
publishes block events all the time, as a worker does. Requests come by the clock, over HTTP, in five phases: the store
is whole, flushed every half second, two seconds slow, gone, back. One JSON line: p50, p90 and p99 of each phase, what
the p99 has more than in the first one, errors (there should be none), and after how many heartbeats the view was whole
again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from redis.asyncio import Redis

from kvstore.blocks import NAME_BYTES
from kvstore.index.base import WorkerRecord
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.redis import RedisIndex
from services.bench.stage import free_port, process, wait_ready
from services.bench.stream_client import percentile
from services.config import home
from services.protocol.auth import channel
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.worker.publisher import Publisher

SECRET = "benchmark"
NAMESPACE = "outage"
CADENCE_MS = 2.0
HEARTBEAT_S = 1.0
SLOW_S = 2.0
WHOLE_LIMIT_S = 30.0
BLOCKS_PER_S = 200


class Relay:
    """Carries bytes between clients and the store, late by ``delay_s`` on the way back; not at all while it is shut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.delay_s = 0.0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, back}
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pump(reader, back, is_answer=False), self._pump(there, writer, is_answer=True))
        self._writers -= {writer, back}

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if is_answer and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                target.write(data)
                await target.drain()
        finally:
            target.close()


class CountingIndex(RedisIndex):
    heartbeats = 0

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        await super().announce(record, load)
        self.heartbeats += 1


async def describe(address: str) -> worker_pb2.Registration:
    link = channel(address, SECRET)
    try:
        make_stub: Any = worker_pb2_grpc.WorkerStub
        return worker_pb2.Registration.FromString(
            (await make_stub(link).Describe(worker_pb2.DescribeRequest())).SerializeToString()
        )
    finally:
        await link.close(None)


class Events:
    """A worker's blocks come and go: as many are held as ``limit`` says, and the oldest are evicted."""

    def __init__(self, publisher: Publisher, limit: int) -> None:
        self.limit = limit
        self._publisher = publisher
        self._names: list[bytes] = []

    @property
    def held(self) -> int:
        return len(self._names)

    async def go_on(self) -> None:
        while True:
            fresh = [random.randbytes(NAME_BYTES) for _ in range(BLOCKS_PER_S // 10)]
            self._names += fresh
            gone = self._names[: max(0, len(self._names) - self.limit)]
            del self._names[: len(gone)]
            self._publisher.note(fresh, gone)
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def publishing(url: str, registration: worker_pb2.Registration) -> AsyncIterator[tuple[CountingIndex, Events]]:
    """Events as of a worker under load."""
    index = CountingIndex(url, NAMESPACE, 5 * HEARTBEAT_S)
    publisher = Publisher(index, lambda: registration, worker_pb2.Load, HEARTBEAT_S)
    publisher.start()
    events = Events(publisher, registration.num_blocks)
    task = asyncio.create_task(events.go_on())
    try:
        yield index, events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.stop()


async def ask(client: httpx.AsyncClient, found_ms: list[float], errors: list[str]) -> None:
    body = {"prompt": [random.randrange(1000) for _ in range(200)], "max_tokens": 2, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                errors.append(str(reply.status_code))
                return
            first_ms = 0.0
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and not first_ms:
                    first_ms = (time.perf_counter() - started) * 1e3
            found_ms.append(first_ms)
    except httpx.HTTPError as exc:
        errors.append(repr(exc))


async def phase(client: httpx.AsyncClient, seconds: float, per_s: float) -> dict[str, Any]:
    found_ms: list[float] = []
    errors: list[str] = []
    async with asyncio.TaskGroup() as group:
        start = time.perf_counter()
        for number in range(int(seconds * per_s)):
            await asyncio.sleep(max(0.0, start + number / per_s - time.perf_counter()))
            group.create_task(ask(client, found_ms, errors))
    if not found_ms:
        raise SystemExit(f"no request was answered: {errors[:3]}")
    row: dict[str, Any] = {f"ttft_p{p}_ms": round(percentile(found_ms, p), 2) for p in (50, 90, 99)}
    return row | {"answered": len(found_ms), "errors": errors[:5], "failed": len(errors)}


def known_blocks(port: int) -> int:
    """What the router says that it knows of the worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/cluster", timeout=5) as reply:
        return int(json.load(reply)["workers"][0]["known_blocks"])


async def run(folder: Path, model: Path, seconds: float, per_s: float) -> dict[str, Any]:
    server = EmbeddedValkey()
    await server.start(folder)
    relay = Relay(int(server.url.rpartition(":")[2].partition("/")[0]))
    await relay.open()
    url = server.url.replace(f"@127.0.0.1:{server.url.rpartition(':')[2]}", f"@127.0.0.1:{relay.port}/0")
    worker_port, port = free_port(), free_port()
    settings = {
        "secret": SECRET,
        "workers": [f"127.0.0.1:{worker_port}"],
        "redis": {"url": url, "namespace": NAMESPACE, "heartbeat_s": HEARTBEAT_S, "ttl_s": 5 * HEARTBEAT_S},
        "worker": {"port": worker_port},
        "router": {"port": port, "grpc_port": 0},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    rows: dict[str, Any] = {}
    try:
        with (
            process("services.bench.paced", file, model, "--cadence-ms", str(CADENCE_MS)),
            process("services.router", file, model),
        ):
            await asyncio.to_thread(wait_ready, port)
            registration = await describe(f"127.0.0.1:{worker_port}")
            limits = httpx.Limits(max_connections=None)
            async with (
                publishing(url, registration) as (index, events),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client,
                Redis.from_url(server.url) as store,
            ):
                await phase(client, 2.0, per_s)  # warm
                rows["whole"] = await phase(client, seconds, per_s)
                flushing = asyncio.create_task(_flush(store))
                rows["flushed"] = await phase(client, seconds, per_s)
                flushing.cancel()
                relay.delay_s = SLOW_S
                rows["slow"] = await phase(client, seconds, per_s)
                relay.delay_s = 0.0
                relay.shut()
                events.limit //= 2  # the router cannot know; it must come to
                rows["gone"] = await phase(client, seconds, per_s)
                await store.flushall()
                await relay.open()
                before = index.heartbeats
                again = await _whole_again(port, events)
                rows["back"] = {"whole_after_heartbeats": index.heartbeats - before if again else None}
                rows["back"] |= await phase(client, seconds, per_s)
    finally:
        relay.shut()
        await server.stop()
    for row in rows.values():
        row["added_p99_ms"] = round(row["ttft_p99_ms"] - rows["whole"]["ttft_p99_ms"], 2)
    return rows


async def _flush(store: Any) -> None:
    while True:
        await store.flushall()
        await asyncio.sleep(0.5)


async def _whole_again(port: int, events: Events) -> bool:
    """Whether the router comes to know what is held, but for the last tenths of a second."""
    until_s = time.monotonic() + WHOLE_LIMIT_S
    while time.monotonic() < until_s:
        if abs(await asyncio.to_thread(known_blocks, port) - events.held) <= BLOCKS_PER_S // 4:
            return True
        await asyncio.sleep(0.05)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--per-s", type=float, default=40.0, help="requests a second")
    options = parser.parse_args()
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    with tempfile.TemporaryDirectory(prefix="pdray-outage-") as folder:
        rows = asyncio.run(run(Path(folder), model, options.seconds, options.per_s))
    machine = f"{platform.machine()}, {psutil.cpu_count()} cores"
    sys.stdout.write(
        json.dumps({"benchmark": "index_outage", "per_s": options.per_s, "machine": machine} | rows) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
