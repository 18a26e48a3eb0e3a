"""Targets in the whole flow, over real gRPC: what is counted, what is refused at once, and what is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.engine_config import EngineConfig
from services.protocol.errors import ErrorCode, RequestError
from services.router.admission.slo import SLO
from services.router.core import RouterCore
from services.router.types import RouterRequest
from services.slo_config import AdmissionConfig
from tests.fake_worker import Cluster, FakeWorker, accept_only, hand_off, token
from tests.unit.test_flow import collect, counted, ended_clean, make_core, request, until

STEP_TOKENS = 50
SLOW = {"prefill_tokens_per_s": 100.0}


class Pair:
    def __init__(self, core: RouterCore, p: FakeWorker, d: FakeWorker) -> None:
        self.core, self.p, self.d = core, p, d

    def misses(self, which: str) -> float:
        families = self.core.metrics.slo_misses.collect()
        samples = [s for f in families for s in f.samples if s.name.endswith("_total") and s.labels["which"] == which]
        return sum(s.value for s in samples)

    async def answer(self, asked: RouterRequest) -> None:
        """Speak for the workers: token 1, the hand-off, the rest."""
        await until(lambda: any(s.request.request_id == asked.request_id for s in self.p.submits))
        sent = next(s.request for s in self.p.submits if s.request.request_id == asked.request_id)
        await self.p.output(sent, 0, token(0))
        await hand_off(self.p, self.d, sent)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    cluster = Cluster()
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(
        cluster,
        engine=EngineConfig(max_num_batched_tokens=STEP_TOKENS),
        admission=AdmissionConfig(order="fcfs", held_steps=1.0),
    )
    await core.start()
    await until(lambda: core.ready()[0])
    yield Pair(core, p, d)
    await core.stop()
    await cluster.stop()


async def test_a_request_that_keeps_its_targets_is_goodput_and_one_that_does_not_is_a_miss(pair: Pair) -> None:
    await collect(pair.core, request(4, slo=SLO(ttft_ms=60_000, tpot_ms=60_000, e2e_ms=60_000)))
    assert counted(pair.core, "pdray_goodput_requests_total") == 1
    await collect(pair.core, request(4))
    assert counted(pair.core, "pdray_goodput_requests_total") == 1, "without targets it is in neither count"
    await collect(pair.core, request(4, slo=SLO(tpot_ms=1e-6, e2e_ms=60_000)))
    assert (pair.misses("tpot"), pair.misses("e2e"), pair.misses("ttft")) == (1, 0, 0)
    assert counted(pair.core, "pdray_goodput_requests_total") == 1
    assert counted(pair.core, "pdray_ttft_prediction_error_ratio_count") == 3
    await ended_clean(pair.core)


async def test_a_failed_request_misses_what_it_was_promised(pair: Pair) -> None:
    async def broken(worker: FakeWorker, submit: object) -> None:
        raise RequestError(ErrorCode.INTERNAL, "no")

    pair.p.on_submit = broken
    with pytest.raises(RequestError):
        await collect(pair.core, request(4, slo=SLO(ttft_ms=60_000)))
    labels = {"which": "ttft", "phase": "failed"}
    assert pair.core.metrics.registry.get_sample_value("pdray_slo_miss_total", labels) == 1


async def test_what_cannot_be_in_time_is_refused_before_a_worker_is_asked(pair: Pair) -> None:
    await pair.p.set_load(**SLOW)
    await until(lambda: pair.core.view.entry("p0").load.prefill_tokens_per_s == 100.0)  # type: ignore[union-attr]
    asked = request(4, slo=SLO(ttft_ms=300))  # 40 tokens take 400 ms
    with pytest.raises(RequestError, match="400 computing") as raised:
        await collect(pair.core, asked)
    assert raised.value.status.http == 503
    assert raised.value.retry_after_s
    assert pair.p.submits == []
    assert counted(pair.core, "pdray_admission_refusals_total", reason="ttft") == 1
    assert (counted(pair.core, "pdray_goodput_requests_total"), pair.misses("ttft")) == (0, 0)
    shown = pair.core.request_debug(asked.request_id)
    assert shown is not None
    assert shown["slo_ms"] == {"ttft": 300}
    assert shown["promise"]["compute_ms"] == 400
    assert shown["attempts"] == []
    await ended_clean(pair.core)


async def test_a_request_waits_in_the_router_and_its_timeline_says_so(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    await pair.p.set_load(**SLOW, waiting_prefill_tokens=500)
    await until(lambda: pair.core.view.entry("p0").load.waiting_prefill_tokens == 500)  # type: ignore[union-attr]
    asked = request(3)
    task = asyncio.create_task(collect(pair.core, asked))
    await until(lambda: counted(pair.core, "pdray_waiting_requests") == 1)
    await asyncio.sleep(0.05)
    assert pair.p.submits == []
    await pair.p.set_load(waiting_prefill_tokens=0)
    await pair.answer(asked)
    await task
    shown = pair.core.request_debug(asked.request_id)
    assert shown is not None
    assert shown["ttft_parts_ms"]["router_queue"] >= 50
    assert shown["promise"]["queue_ms"] > 1000
    assert shown["ttft_prediction_error"] > 0
    assert [e["name"] for e in shown["events"]][:2] == ["promised", "submit"]
    await ended_clean(pair.core)


async def test_a_client_that_leaves_the_routers_queue_costs_no_worker_anything(pair: Pair) -> None:
    await pair.p.set_load(**SLOW, waiting_prefill_tokens=500)
    await until(lambda: pair.core.view.entry("p0").load.waiting_prefill_tokens == 500)  # type: ignore[union-attr]
    task = asyncio.create_task(collect(pair.core, request(3)))
    await until(lambda: counted(pair.core, "pdray_waiting_requests") == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counted(pair.core, "pdray_waiting_requests") == 0
    await ended_clean(pair.core)
    assert pair.p.submits == []
    assert pair.p.aborts == []
