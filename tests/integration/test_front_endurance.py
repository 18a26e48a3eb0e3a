"""Nothing is left of thousands of requests, whatever became of them (case A48), and many streams run at once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio

from services.config import RouterConfig, ServeConfig
from services.protocol.proto import worker_pb2
from services.router.core import RouterCore
from services.router.serve import Fronts, serve_fronts
from tests.fake_worker import SECRET, Cluster, FakeWorker, run_normally, token
from tests.fronts import make_card, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

REQUESTS, AT_ONCE, KEPT = 5000, 40, 100
LONG = 1000
"""max_tokens of those whose client leaves: they would go on for long."""


async def run_until_aborted(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
    """A mixed worker's answer; a long one comes token by token for as long as anybody wants it."""
    request = submit.request
    if request.sampling.max_tokens < LONG:
        await run_normally(worker, submit)
        return

    async def go_on() -> None:
        for i in range(request.sampling.max_tokens):
            if (request.request_id, request.attempt) in worker.aborts:
                return
            await worker.output(request, i, token(i) % 400)
            await asyncio.sleep(0.005)

    worker.spawn(go_on())


@dataclass
class Door:
    core: RouterCore
    fronts: Fronts
    worker: FakeWorker

    async def ask(self, path: str, body: dict[str, Any], *, leave_after: int = 0) -> int:
        """The status; ``leave_after``: so many lines of a stream, then the connection is closed."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.fronts.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        try:
            async with asyncio.timeout(60):
                status = int((await reader.readline()).split()[1])
                seen = 0
                while line := await reader.readline():
                    seen += line.startswith(b"data: ")
                    if leave_after and seen >= leave_after:
                        break
        finally:
            writer.close()
        return status

    async def settled(self) -> None:
        live = self.fronts.http_app.state.live
        await until(lambda: not (self.core.flow.active or len(live) or self.core._switchboard.background_tasks), 30)
        gc.collect()

    def held(self) -> dict[str, int]:
        """What must not grow."""
        core, process = self.core, psutil.Process()
        return {
            "files": process.num_fds(),
            "tasks": len(asyncio.all_tasks()),
            "bookings": len(core.view.bookings),
            "exchanges": len(core._switchboard),
            "running": len(self.fronts.front.running),
            "held": len(core.flow._deps.gate._held),
            "waiting": len(core.flow._deps.gate),
            "timelines": len(core.timelines),
            "rss_kib": process.memory_info().rss >> 10,
            "objects": len(gc.get_objects()),
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """The real front and router before one worker that answers at once."""
    cluster = Cluster()
    worker = await cluster.add("m0", "mixed")
    worker.on_submit = run_until_aborted
    card = make_card(
        tmp_path_factory.mktemp("model"),
        model_fingerprint="model-a",
        tokenizer_fingerprint="tokenizer-a",
        max_model_len=4096,
    )
    router = RouterConfig(port=0, grpc_port=0, timelines_kept=KEPT)
    config = ServeConfig(secret=SECRET, workers=tuple(cluster.addresses), router=router)
    core = RouterCore(config, card)
    await core.start()
    fronts = await serve_fronts(core, config)
    await until(lambda: core.ready()[0])
    yield Door(core, fronts, worker)
    await fronts.stop(1.0)
    await core.stop()
    await cluster.stop()


async def one(door: Door, number: int) -> str:
    """A fifth leaves in the middle, a tenth is refused; among the rest are chats, streams, and texts to embed."""
    kind = number % 10
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": f"Request {number}"}], "max_tokens": 4}
    if kind in (0, 5):
        body = {**chat, "max_tokens": LONG, "stream": True}
        assert await door.ask("/v1/chat/completions", body, leave_after=1 + number % 3) == 200
        return "left"
    if kind == 3:
        assert await door.ask("/v1/chat/completions", {**chat, "temperature": 9}) == 400
        return "refused"
    if kind == 7:
        assert await door.ask("/v1/embeddings", {"input": [f"Text {number}", "another"]}) == 200
        return "embedded"
    assert await door.ask("/v1/chat/completions", {**chat, "stream": bool(kind % 2)}) == 200
    return "answered"


async def serve(door: Door, numbers: range) -> Counter[str]:
    todo, found = iter(numbers), Counter[str]()

    async def client() -> None:
        for number in todo:
            found[await one(door, number)] += 1
            if number % 100 == 0:
                door.worker.submits.clear()
                del door.worker.aborts[:-1000]

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    await door.settled()
    door.worker.submits.clear()
    door.worker.aborts.clear()
    return found


async def test_a48_nothing_is_left_of_five_thousand_requests(door: Door) -> None:
    await serve(door, range(REQUESTS // 10))  # what is made once, and kept, is there
    first = await serve(door, range(REQUESTS // 2))
    half = door.held()
    second = await serve(door, range(REQUESTS // 2))
    whole = door.held()
    total = first + second
    assert total == {"left": 1000, "refused": 500, "embedded": 500, "answered": 3000}
    for name in ("bookings", "exchanges", "running", "held", "waiting"):
        assert whole[name] == 0, (name, whole)
    assert whole["timelines"] <= KEPT
    assert whole["files"] <= half["files"] + 2, (half, whole)
    assert whole["tasks"] <= half["tasks"] + 2, (half, whole)
    assert whole["objects"] < half["objects"] + 3000, (half, whole)  # less than two for each request
    assert whole["rss_kib"] < half["rss_kib"] + 6 * 1024, (half, whole)  # less than 2.5 KiB for each


async def test_five_hundred_streams_at_once_all_end_well(door: Door) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "stream": True}
    statuses = await asyncio.gather(*(door.ask("/v1/chat/completions", body) for _ in range(500)))
    assert statuses == [200] * 500
    await door.settled()
    assert door.held()["bookings"] == door.held()["running"] == 0
