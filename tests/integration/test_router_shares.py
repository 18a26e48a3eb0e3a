"""Four prefill and four decode workers of a fast fake engine behind the real router: shares, herds, retries, losses."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.config import WorkerConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.core import RouterCore
from services.router.types import RouterRequest
from services.slo_config import HealthConfig
from tests.fake_worker import Cluster, FakeWorker, run_normally
from tests.unit.test_flow import collect, counted, make_core, request, until

TOKENS_PER_S = 100_000.0
PATIENT = WorkerConfig(stall_s=30.0)
"""A busy machine is no loss of a worker."""
PREFIX = tuple(range(1, 513))
NAME_BYTES = 16
BLOCK_TOKENS = 16


class FastEngine:
    """One prompt after the other, at a given speed; blocks that it has computed once cost nothing again."""

    def __init__(self, worker: FakeWorker) -> None:
        self._lock = asyncio.Lock()
        self._blocks: set[bytes] = set()
        worker.load.prefill_tokens_per_s = TOKENS_PER_S
        worker.load.step_ms = 1.0
        worker.on_submit = self.submit

    async def submit(self, worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        worker.load.waiting_prefill_tokens += len(submit.request.prompt_ids)
        worker.spawn(self._compute(worker, submit))

    async def _compute(self, worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        text = submit.request.block_names
        names = [text[i : i + NAME_BYTES] for i in range(0, len(text), NAME_BYTES)]
        async with self._lock:
            cached = next((i for i, name in enumerate(names) if name not in self._blocks), len(names))
            tokens = len(submit.request.prompt_ids) - cached * BLOCK_TOKENS
            await asyncio.sleep(tokens / TOKENS_PER_S)
            self._blocks.update(names)
            worker.load.waiting_prefill_tokens -= len(submit.request.prompt_ids)
        await run_normally(worker, submit)


class Fleet:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.cores: list[RouterCore] = []

    async def start(self) -> None:
        for i in range(4):
            FastEngine(await self.cluster.add(f"p{i}", "prefill"))
            await self.cluster.add(f"d{i}", "decode")

    async def router(self, **changes: Any) -> RouterCore:
        core = make_core(self.cluster, **({"worker": PATIENT} | changes))
        self.cores.append(core)
        await core.start()
        await until(lambda: sum(w["state"] == "ready" for w in core.cluster()["workers"]) == 8)
        return core

    async def stop(self) -> None:
        for core in self.cores:
            await core.stop()
        await self.cluster.stop()

    def submits(self) -> Counter[str]:
        """By prefill worker."""
        return Counter({w.worker_id: len(w.submits) for w in self.cluster.workers.values() if w.role == "prefill"})

    def upstream(self) -> Counter[str]:
        """Submissions of each request."""
        return Counter(s.request.request_id for w in self.cluster.workers.values() for s in w.submits)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    await made.start()
    yield made
    await made.stop()


def tailed(draw: random.Random) -> RouterRequest:
    """The shared prefix and a tail of its own."""
    return request(2, PREFIX + tuple(draw.randrange(1000, 40_000) for _ in range(64)))


async def answered(core: RouterCore, asked: list[RouterRequest], at_once: int) -> list[BaseException]:
    """What went wrong, request by request."""
    slots = asyncio.Semaphore(at_once)

    async def one(r: RouterRequest) -> None:
        async with slots:
            await collect(core, r)

    results = await asyncio.gather(*(one(r) for r in asked), return_exceptions=True)
    return [r for r in results if r is not None]


async def test_under_load_a_shared_prefix_does_not_put_all_work_on_one_worker(fleet: Fleet) -> None:
    core, draw = await fleet.router(), random.Random(1)
    asked = [tailed(draw) for _ in range(400)]
    assert await answered(core, asked, at_once=64) == []
    shares = fleet.submits()
    assert sum(shares.values()) == 400
    assert max(shares.values()) <= 2 * 400 / 4, shares
    readers = Counter(s.reader.worker_id for w in fleet.cluster.workers.values() for s in w.submits)
    assert max(readers.values()) <= 2 * 400 / 4, readers


async def test_one_at_a_time_a_shared_prefix_stays_where_it_is_cached(fleet: Fleet) -> None:
    core, draw = await fleet.router(), random.Random(2)
    for _ in range(40):
        await collect(core, tailed(draw))
    shares = fleet.submits()
    assert max(shares.values()) >= 0.9 * 40, shares


async def test_a_burst_through_two_routers_does_not_herd(fleet: Fleet) -> None:
    cores = [await fleet.router(), await fleet.router()]
    asked = [request(2, tuple(range(i * 1000, i * 1000 + 600))) for i in range(64)]
    errors = await asyncio.gather(*(answered(core, asked[i::2], at_once=64) for i, core in enumerate(cores)))
    assert errors == [[], []]
    shares = fleet.submits()
    assert all(8 <= n <= 24 for n in shares.values()), shares
    assert len(shares) == 4


async def test_bad_requests_are_sent_once_at_most_and_cost_no_worker_its_place(fleet: Fleet) -> None:
    core = await fleet.router(health=HealthConfig(failures=3))
    errors = await answered(core, [request(2, tuple(range(5000))) for _ in range(50)], at_once=8)
    assert {e.code for e in errors if isinstance(e, RequestError)} == {ErrorCode.CONTEXT_LENGTH_EXCEEDED}
    assert not fleet.upstream(), "they were refused before any worker was asked"

    async def refuse(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        raise RequestError(ErrorCode.INVALID_REQUEST, "the grammar does not compile")

    engines = {w.worker_id: w.on_submit for w in fleet.cluster.workers.values()}
    for worker in fleet.cluster.workers.values():
        worker.on_submit = refuse
    errors = await answered(core, [request(2) for _ in range(50)], at_once=8)
    assert [e.code for e in errors if isinstance(e, RequestError)] == [ErrorCode.INVALID_REQUEST] * 50
    assert set(fleet.upstream().values()) == {1}
    for worker in fleet.cluster.workers.values():
        worker.on_submit = engines[worker.worker_id]
    assert len(await collect(core, request(2))) > 0
    assert counted(core, "pdray_retries_total", code="invalid_request") == 0
    assert {w["state"] for w in core.cluster()["workers"]} == {"ready"}


async def test_a_worker_that_dies_while_it_is_the_warm_one_costs_each_request_one_more_try_at_most(
    fleet: Fleet,
) -> None:
    core, draw = await fleet.router(), random.Random(3)
    for _ in range(5):
        await collect(core, tailed(draw))
    warm = fleet.submits().most_common(1)[0][0]
    await fleet.cluster.workers[warm].kill()
    killed_s = time.monotonic()
    asked = [tailed(draw) for _ in range(50)]
    assert await answered(core, asked, at_once=50) == []
    assert max(fleet.upstream()[r.request_id] for r in asked) <= 2
    await until(lambda: warm not in {w.worker_id for w in core.view.candidates([])})
    assert time.monotonic() - killed_s < core.config.redis.ttl_s
    before = fleet.submits()[warm]
    assert await answered(core, [tailed(draw) for _ in range(20)], at_once=20) == []
    assert fleet.submits()[warm] == before


async def test_a_worker_that_fails_all_it_gets_is_left_out_and_comes_back_by_a_probe(fleet: Fleet) -> None:
    core = await fleet.router(health=HealthConfig(failures=3, open_s=0.3))
    sick, engine = fleet.cluster.workers["p0"], fleet.cluster.workers["p0"].on_submit

    async def break_down(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        raise RequestError(ErrorCode.INTERNAL, "the engine is broken")

    sick.on_submit = break_down

    def state() -> str:
        return next(w["state"] for w in core.cluster()["workers"] if w["worker_id"] == "p0")

    failed = 0
    async with asyncio.timeout(20):
        while state() != "tripped":
            failed += len(await answered(core, [request(2)], at_once=1))
            await asyncio.sleep(0.06)
    assert failed == 3
    assert core.ready()[0]
    errors = await answered(core, [request(2) for _ in range(20)], at_once=4)
    probes = counted(core, "pdray_circuits_opened_total", worker="p0") - 1
    assert len(errors) == probes, "only a probe may meet it, and each of them opens the circuit again"
    sick.on_submit = engine
    await until(lambda: core.ready()[0] and state() == "ready")  # half-open
    before = len(sick.submits)
    async with asyncio.timeout(20):
        while len(sick.submits) == before or core._health._circuits:
            assert await answered(core, [request(2, tuple(range(500)))], at_once=1) == []
    assert state() == "ready"


async def test_a_draining_worker_gets_nothing_new(fleet: Fleet) -> None:
    core = await fleet.router()
    leaving = fleet.cluster.workers["p1"]
    leaving.registration.draining = True
    leaving.sign()
    await leaving.say(worker_pb2.WorkerMessage(registration=leaving.registration))
    await until(lambda: "p1" not in {w.worker_id for w in core.view.candidates([])})
    before = len(leaving.submits)
    assert await answered(core, [request(2) for _ in range(30)], at_once=30) == []
    assert len(leaving.submits) == before
