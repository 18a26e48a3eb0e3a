"""Targets, explanations and traces as clients of HTTP and gRPC meet them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from services.protocol.proto import inference_pb2, inference_pb2_grpc
from services.router.admission.explain import MAX_BYTES, decision_header
from services.router.admission.promise import Promise
from services.router.admission.slo import SLO
from services.router.serve import Fronts
from services.router.types import RouterRequest, TokenEvent
from services.slo_config import SLOConfig
from tests.fronts import FakeCore, client_of, error_of, make_core, running, saying

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[FakeCore, Fronts, httpx.AsyncClient]]:
    core = make_core(tmp_path)
    async with running(core) as fronts, client_of(fronts) as client:
        yield core, fronts, client


Served = tuple[FakeCore, Fronts, httpx.AsyncClient]


async def test_headers_and_the_body_set_the_targets_of_one_request(served: Served) -> None:
    core, _, client = served
    await client.post("/v1/completions", json=BODY)
    headers = {"X-PDRay-TTFT-MS": "250", "X-PDRay-E2E-MS": "4000.5"}
    answer = await client.post("/v1/completions", json={**BODY, "slo": {"tpot_ms": 30, "ttft_ms": 1}}, headers=headers)
    assert answer.status_code == 200
    assert "x-pdray-ignored" not in answer.headers
    assert [r.slo for r in core.flow.requests] == [SLO(), SLO(ttft_ms=250, tpot_ms=30, e2e_ms=4000.5)]


async def test_what_is_no_target_is_a_400_that_names_it(served: Served) -> None:
    core, _, client = served
    bad = await client.post("/v1/completions", json=BODY, headers={"X-PDRay-TPOT-MS": "quick"})
    assert bad.status_code == 400
    assert "x-pdray-tpot-ms" in error_of(bad)["message"]
    bad = await client.post("/v1/completions", json={**BODY, "slo": {"ttft_ms": -4}})
    assert bad.status_code == 400
    assert error_of(bad)["param"] == "slo.ttft_ms"
    assert core.flow.requests == []


async def test_grpc_metadata_sets_them_too(served: Served) -> None:
    core, fronts, _ = served
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            inference_pb2.GenerateRequest(prompt="Hello"), metadata=(("x-pdray-ttft-ms", "90"), ("x-other", "1"))
        )
        async for _ in call:
            pass
    assert core.flow.requests[0].slo == SLO(ttft_ms=90)


async def test_the_settings_are_the_targets_of_who_names_none(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    object.__setattr__(core.config, "slo", SLOConfig(ttft_ms=700))
    async with running(core) as fronts, client_of(fronts) as client:
        await client.post("/v1/completions", json=BODY)
    assert core.flow.requests[0].slo == SLO(ttft_ms=700)


def decided(core: FakeCore) -> Any:
    """A script that leaves behind what the flow notes of a decision."""

    async def script(request: RouterRequest) -> AsyncIterator[TokenEvent]:
        timeline = core.timelines.open(request.request_id)
        timeline.promised(Promise(queue_ms=3, compute_ms=5))
        terms = {"queue_ms": 3.0, "load_ms": 0.0, "compute_ms": 5.0, "transfer_ms": 0.0, "cost_ms": 8.0}
        rows = [{"prefill": p, "decode": "d0", **terms} for p in ("p0", "p1")]
        decision = {"policy": "cost", "predicted_ms": 8.0, "considered": 2, "candidates": rows}
        timeline.begin_attempt(1, "submit", ("p0", "d0"), decision)
        async for event in saying("Hello")(request):
            yield event

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_an_explanation_is_a_header_where_it_is_asked_for(served: Served, stream: bool) -> None:
    core, _, client = served
    core.flow.script = decided(core)
    plain = await client.post("/v1/completions", json={**BODY, "stream": stream})
    assert "x-pdray-decision" not in plain.headers
    asked = await client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"X-PDRay-Explain": "1"})
    told = json.loads(asked.headers["x-pdray-decision"])
    assert (told["prefill"], told["decode"], told["policy"], told["considered"]) == ("p0", "d0", "cost", 2)
    assert told["cost_ms"] == 8.0
    assert told["terms"] == {"queue_ms": 3.0, "compute_ms": 5.0}
    assert told["next"] == {"prefill": "p1", "decode": "d0", "cost_ms": 8.0}
    assert told["promise"]["queue_ms"] == 3


async def test_an_explanation_of_what_was_never_decided_is_empty(served: Served) -> None:
    _, _, client = served
    bad = await client.post("/v1/completions", json={"prompt": 5}, headers={"X-PDRay-Explain": "1"})
    assert bad.status_code == 400
    assert bad.headers["x-pdray-decision"] == "{}"
    assert decision_header(None) == b"{}"


def test_an_explanation_stays_short() -> None:
    long = {"attempts": [{"prefill": "p" * 3000, "decode": "", "decision": {}}], "promise": {"x": "y" * 3000}}
    assert decision_header(long) == b"{}"
    assert MAX_BYTES < 8192


# --- traces ---


async def test_a_listener_gets_what_is_asked_and_a_bare_question_is_refused(served: Served) -> None:
    core, _, client = served
    for bad in ("", "?seconds=0", "?seconds=x", "?seconds=1e9", "?seconds=99999999"):
        assert (await client.get(f"/debug/trace{bad}")).status_code == 400
    async with client.stream("GET", "/debug/trace?seconds=0.4") as answer:
        lines = answer.aiter_lines()
        first = asyncio.ensure_future(anext(lines))
        async with asyncio.timeout(5):
            while not core.recorder.is_active:
                await asyncio.sleep(0.005)
        core.recorder.note(time.monotonic(), list(range(600)), "", 7)
        row = json.loads(await first)
        assert (row["input_length"], row["output_length"], len(row["hash_ids"])) == (600, 7, 2)
        assert [line async for line in lines] == []
    assert not core.recorder.is_active
