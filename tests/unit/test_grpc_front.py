"""pdray.v1.Inference, health and reflection over a real channel, and the small client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.protocol.client import AsyncPdrayClient, CallOptions, PdrayClient, Sampling, channel_options
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import inference_pb2, inference_pb2_grpc
from services.router.front import Front
from services.router.grpc_front import InferenceServicer
from services.router.grpc_health import HealthServicer
from services.router.serve import Fronts
from services.router.types import TokenEvent
from tests.fronts import FakeCore, failing, hanging, ids_of, make_core, running, saying, tokenizer, until

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return make_core(tmp_path)


@pytest.fixture
async def fronts(core: FakeCore) -> AsyncIterator[Fronts]:
    async with running(core) as started:
        yield started


@pytest.fixture
async def client(fronts: Fronts) -> AsyncIterator[AsyncPdrayClient]:
    async with AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}") as made:
        yield made


async def refusal(client: AsyncPdrayClient, *args: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async for _ in client.generate(*args, **fields):
            pass
    return caught.value


async def test_the_answer_streams_and_its_last_message_has_the_usage(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = saying("한국어 and 👨‍👩‍👧‍👦", cached_tokens=2)
    pieces = [piece async for piece in client.generate("Once", temperature=0, max_tokens=200)]
    assert "".join(p.text for p in pieces) == "한국어 and 👨‍👩‍👧‍👦"
    ids = [i for p in pieces for i in p.token_ids]
    assert tokenizer().decode(ids) == "한국어 and 👨‍👩‍👧‍👦"
    assert [p.finish_reason for p in pieces[-2:]] == ["", "stop"]
    usage = pieces[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(ids_of("Once")), len(ids), 2)
    assert all(p.usage is None for p in pieces[:-1])
    assert {p.request_id for p in pieces} == {core.flow.requests[0].request_id}


async def test_every_field_of_sampling_reaches_the_flow(core: FakeCore, client: AsyncPdrayClient) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, seed=-1, max_tokens=9, min_tokens=2, ignore_eos=True)
    options = CallOptions(model="tiny", request_id="job 7", cache_salt="s")
    assert [p async for p in client.generate([5, 6], sampling, options)]
    request = core.flow.requests[0]
    assert (request.prompt_ids, request.label, request.salt) == ((5, 6), "job7", "s")
    spec = request.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.seed) == (0.5, 0.9, 7, -1)
    assert (spec.max_tokens, spec.min_tokens, spec.ignore_eos) == (9, 2, True)


async def test_a_stop_string_ends_the_answer_and_tells_the_flow(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = saying("one two three")
    pieces = [p async for p in client.generate("x", stop=["two"], stop_token_ids=[4])]
    assert "".join(p.text for p in pieces) == "one "
    assert pieces[-1].finish_reason == "stop"
    assert list(core.flow.ends.values()) == ["closed"]


@pytest.mark.parametrize(
    ("prompt", "fields", "code"),
    [
        ("", {}, ErrorCode.INVALID_REQUEST),
        ([], {}, ErrorCode.INVALID_REQUEST),
        ([10**6], {}, ErrorCode.INVALID_REQUEST),
        ("x", {"temperature": float("nan")}, ErrorCode.INVALID_REQUEST),
        ("x", {"temperature": -1}, ErrorCode.INVALID_REQUEST),
        ("x", {"max_tokens": 0}, ErrorCode.INVALID_REQUEST),
        ("x", {"max_tokens": 10**9}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ("x", {"stop": [""]}, ErrorCode.INVALID_REQUEST),
        ([5] * 256, {}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ("x", {"options": CallOptions(model="no-such")}, ErrorCode.MODEL_NOT_FOUND),
    ],
)
async def test_a_bad_request_is_refused_like_over_http(
    core: FakeCore, client: AsyncPdrayClient, prompt: Any, fields: dict[str, Any], code: ErrorCode
) -> None:
    assert (await refusal(client, prompt, **fields)).code is code
    assert core.flow.requests == []


async def test_an_error_has_its_status_its_code_and_the_wait(core: FakeCore, fronts: Fronts) -> None:
    core.flow.script = failing(RequestError(ErrorCode.OVERLOADED, "too many", retry_after_s=0.25), after="Hel")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}", options=channel_options(1 << 20)) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(prompt="x"))
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "too many"
        trailing = dict(await call.trailing_metadata())
        assert (trailing["pdray-error-code"], trailing["retry-after-ms"]) == ("overloaded", "250")
    assert core.request_debug(core.flow.requests[0].request_id)["outcome"] == "overloaded"  # type: ignore[index]


async def test_the_client_raises_what_the_server_said(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = failing(RequestError(ErrorCode.OVERLOADED, "too many", retry_after_s=0.25))
    error = await refusal(client, "x")
    assert (error.code, error.message, error.retry_after_s) == (ErrorCode.OVERLOADED, "too many", 0.25)


async def test_a_bug_behind_the_front_tells_nothing(
    core: FakeCore, client: AsyncPdrayClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(_request: Any) -> AsyncIterator[TokenEvent]:
        raise ZeroDivisionError("secret detail")
        yield

    core.flow.script = script
    error = await refusal(client, "x")
    assert error.code is ErrorCode.INTERNAL
    assert "secret" not in error.message
    assert "secret detail" in caplog.text


async def test_leaving_the_loop_cancels_the_request_again_and_again(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = hanging("Hello world and more")
    for _ in range(20):
        pieces = client.generate("x")
        for _ in range(3):
            await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
    await until(lambda: len(core.flow.ends) == 20)
    assert set(core.flow.ends.values()) <= {"cancelled", "closed"}
    await until(lambda: all(core.request_debug(r.request_id)["outcome"] == "cancelled" for r in core.flow.requests))  # type: ignore[index]


async def test_a_deadline_becomes_the_budget_and_ends_the_request(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = hanging("Hi")
    error = await refusal(client, "x", options=CallOptions(timeout_s=0.5))
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    budget = core.flow.requests[0].budget_s
    assert budget is not None
    assert 0 < budget <= 0.5
    await until(lambda: len(core.flow.ends) == 1)
    core.flow.script = saying("fine")
    assert [p async for p in client.generate("x")]
    assert core.flow.requests[1].budget_s is None


def test_the_blocking_client_streams_and_leaves_cleanly(core: FakeCore) -> None:
    def use(port: int) -> tuple[str, str]:
        with PdrayClient(f"127.0.0.1:{port}") as client:
            text = "".join(piece.text for piece in client.generate("x"))
            pieces = client.generate("x")
            first = next(pieces).text
            pieces.close()  # type: ignore[attr-defined]
            with pytest.raises(RequestError, match="temperature"):
                list(client.generate("x", temperature=9))
            return text, first

    async def main() -> tuple[str, str]:
        async with running(core) as fronts:
            return await asyncio.to_thread(use, fronts.grpc_port)

    text, first = asyncio.run(main())
    assert text == "Hello world"
    assert text.startswith(first)


def test_sampling_comes_whole_or_in_fields() -> None:
    with PdrayClient("127.0.0.1:1") as client, pytest.raises(TypeError, match="not both"):
        next(client.generate("x", Sampling(), temperature=0))


async def test_one_limit_rules_both_ends_and_is_named(tmp_path: Path) -> None:
    core = make_core(tmp_path, router={"max_body_bytes": 64 << 10}, model={"max_model_len": 10**6}, max_model_len=10**6)
    async with running(core) as fronts:
        address = f"127.0.0.1:{fronts.grpc_port}"
        async with AsyncPdrayClient(address) as generous:
            error = await refusal(generous, "ab " * 30_000)
            assert error.code is ErrorCode.BODY_TOO_LARGE
            assert str(64 << 10) in error.message
            assert [p async for p in generous.generate("ab " * 10_000)]
        async with AsyncPdrayClient(address, max_message_bytes=1 << 10) as careful:
            assert "1024" in (await refusal(careful, "ab " * 1000)).message


# --- health and reflection ---


@pytest.mark.parametrize("name", ["", "readiness", "pdray.v1.Inference"])
async def test_readiness_follows_the_core_and_liveness_does_not(core: FakeCore, fronts: Fronts, name: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        check = lambda service: stub.Check(health_pb2.HealthCheckRequest(service=service))  # noqa: E731
        assert (await check(name)).status == STATUS.SERVING
        core.not_ready = "no workers"
        assert (await check(name)).status == STATUS.NOT_SERVING
        assert (await check("liveness")).status == STATUS.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_each_change(core: FakeCore) -> None:
    watch = HealthServicer(core, watch_period_s=0.001).Watch(health_pb2.HealthCheckRequest(), None)
    assert (await anext(watch)).status == STATUS.SERVING
    core.not_ready = "no workers"
    assert (await anext(watch)).status == STATUS.NOT_SERVING
    core.not_ready = ""
    assert (await anext(watch)).status == STATUS.SERVING
    await watch.aclose()
    unknown = HealthServicer(core).Watch(health_pb2.HealthCheckRequest(service="nobody"), None)
    assert (await anext(unknown)).status == STATUS.SERVICE_UNKNOWN
    await unknown.aclose()


async def test_reflection_lists_the_services(fronts: Fronts) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        call.cancel()
    assert {s.name for s in answer.list_services_response.service} >= {"pdray.v1.Inference", "grpc.health.v1.Health"}


# --- behind Serve's proxy ---


class ProxyContext:
    """As Ray Serve's context: no abort, no deadline; what is set is sent when the method raises."""

    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""
        self.metadata: list[tuple[str, str]] = []

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.metadata = metadata


async def test_the_servicer_works_without_abort_and_deadline(core: FakeCore) -> None:
    front, context = Front(core), ProxyContext()
    servicer = InferenceServicer(front)
    messages = [m async for m in servicer.Generate(inference_pb2.GenerateRequest(prompt="x"), context)]
    assert "".join(m.text for m in messages) == "Hello world"
    with pytest.raises(RequestError):
        [m async for m in servicer.Generate(inference_pb2.GenerateRequest(prompt="x", model="no"), context)]
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert ("pdray-error-code", "model_not_found") in context.metadata
    assert "'no'" in context.details
    front.close()
