"""Requests that pool, through the router: who computes them, what they leave alone, and how they fail."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.config import RouterConfig, ServeConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.core import RouterCore
from services.router.types import RouterRequest, SamplingSpec, TokenEvent, new_request_id
from tests.fake_worker import CARD, NUM_BLOCKS, SECRET, Cluster, FakeWorker, accept_only, run_normally
from tests.fronts import until


def make_core(cluster: Cluster) -> RouterCore:
    router = RouterConfig(max_attempts=3, rescue_wait_s=0.2)
    return RouterCore(ServeConfig(secret=SECRET, workers=tuple(cluster.addresses), router=router), CARD)


def request(tokens: int = 40, **fields: Any) -> RouterRequest:
    values: dict[str, Any] = {
        "request_id": new_request_id(),
        "prompt_ids": tuple(range(7, 7 + tokens)),
        "sampling": SamplingSpec(max_tokens=1, temperature=0.0, seed=0),
        "pools": True,
        "received_s": time.monotonic(),
    }
    return RouterRequest(**(values | fields))


async def collect(core: RouterCore, asked: RouterRequest) -> list[TokenEvent]:
    return [event async for event in core.flow.stream(asked)]


async def refusal(core: RouterCore, asked: RouterRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await collect(core, asked)
    return caught.value


def counted(core: RouterCore, name: str, **labels: str) -> float:
    return core.metrics.registry.get_sample_value(name, labels) or 0.0


async def ended_clean(core: RouterCore) -> None:
    await until(lambda: not core._switchboard.background_tasks)
    assert (core.flow.active, len(core._switchboard), len(core.view.bookings)) == (0, 0, 0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


async def started(cluster: Cluster, *workers: tuple[str, str], states: int = 3) -> RouterCore:
    for worker_id, role in workers:
        worker = await cluster.add(worker_id, role)
        worker.registration.hidden_size = states
        worker.sign()
    core = make_core(cluster)
    await core.start()
    await until(lambda: sum(w["state"] == "ready" for w in core.cluster()["workers"]) == len(workers))
    return core


async def test_a_prefill_worker_alone_computes_it(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"))
    (event,) = await collect(core, request(40))
    assert (event.token_ids, event.finish_reason) == ((), "stop")
    assert struct.unpack("<3f", event.pooled) == (40, 7, 1)
    (submit,) = cluster.workers["p0"].submits
    assert submit.request.pools
    assert not submit.HasField("reader")
    assert not submit.HasField("source")
    assert not submit.request.block_names
    assert not cluster.workers["d0"].submits
    await ended_clean(core)
    assert counted(core, "pdray_embed_seconds_count") == 1
    assert counted(core, "pdray_ttft_seconds_count") == 0
    assert counted(core, "pdray_requests_total", outcome="ok") == 1
    assert counted(core, "pdray_prompt_tokens_total") == 40
    assert core.hidden_size() == 3
    await core.stop()


async def test_a_mixed_worker_computes_it(cluster: Cluster) -> None:
    core = await started(cluster, ("m0", "mixed"))
    assert (await collect(core, request()))[0].pooled
    await core.stop()


async def test_no_decode_worker_is_needed_and_none_takes_it(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"))
    assert (await collect(core, request()))[0].pooled
    assert not core.ready()[0]
    await cluster.workers["p0"].kill()
    await until(lambda: core.cluster()["workers"][0]["state"] != "ready")
    error = await refusal(core, request())
    assert error.code in (ErrorCode.NO_WORKERS, ErrorCode.WORKER_LOST)
    await core.stop()


async def test_decode_workers_alone_cannot(cluster: Cluster) -> None:
    core = await started(cluster, ("d0", "decode"))
    assert (await refusal(core, request())).code is ErrorCode.NO_WORKERS
    await core.stop()


async def test_workers_without_states_are_a_400_with_the_reason(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"), states=0)
    error = await refusal(core, request())
    assert (error.code, error.status.http) == (ErrorCode.NOT_YET_SUPPORTED, 400)
    assert "hidden states" in error.message
    with pytest.raises(RequestError, match="p0"):
        core.hidden_size()
    assert not cluster.workers["p0"].submits
    await core.stop()


async def test_another_worker_takes_over_from_one_that_fails(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"))

    async def fail_once(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        for other in cluster.workers.values():
            other.on_submit = run_normally
        await worker.error(submit.request, ErrorCode.WORKER_LOST, retryable=True)

    for worker in cluster.workers.values():
        worker.on_submit = fail_once
    (event,) = await collect(core, request())
    assert event.pooled
    submits = {w: len(worker.submits) for w, worker in cluster.workers.items()}
    assert submits == {"p0": 1, "p1": 1, "d0": 0}
    await ended_clean(core)
    await core.stop()


async def test_an_error_of_the_engine_is_the_requests_own(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"))

    async def bad(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await worker.error(submit.request, ErrorCode.INTERNAL, retryable=False, message="not finite")

    cluster.workers["p0"].on_submit = bad
    assert "not finite" in (await refusal(core, request())).message
    assert not cluster.workers["d0"].submits
    await ended_clean(core)
    await core.stop()


async def test_closing_the_stream_aborts_it(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"))
    cluster.workers["p0"].on_submit = accept_only
    task = asyncio.create_task(collect(core, request()))
    await until(lambda: bool(cluster.workers["p0"].submits))
    task.cancel()
    await until(lambda: bool(cluster.workers["p0"].aborts))
    await ended_clean(core)
    await core.stop()


async def test_lengths_are_those_of_the_prompt_alone(cluster: Cluster) -> None:
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"))
    assert (await collect(core, request(CARD.max_model_len)))[0].pooled
    error = await refusal(core, request(CARD.max_model_len + 1))
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    await core.stop()


async def test_a_prompt_larger_than_every_pool_never_fits(cluster: Cluster) -> None:
    worker = await cluster.add("m0", "mixed")
    worker.registration.num_blocks = 4
    worker.sign()
    assert NUM_BLOCKS > 4
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    assert (await refusal(core, request(100))).code is ErrorCode.NEVER_FITS
    await core.stop()


async def test_two_answers_and_a_vector_share_a_router(cluster: Cluster) -> None:
    """What is learned of answers and of the traffic is of answers alone."""
    core = await started(cluster, ("p0", "prefill"), ("d0", "decode"))
    rooms = core.flow._deps.gate._rooms
    asked = request(sampling=SamplingSpec(max_tokens=4, temperature=0.0), pools=False)
    await collect(core, asked)
    before = rooms.answers.tokens
    for _ in range(5):
        await collect(core, request())
    assert rooms.answers.tokens == before
    await collect(core, dataclasses.replace(asked, request_id=new_request_id()))
    await ended_clean(core)
    await core.stop()
