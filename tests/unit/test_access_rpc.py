"""Keys, scopes and limits over gRPC: every RPC of every service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.protocol.client import AsyncPdrayClient, CallOptions
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import inference_pb2, inference_pb2_grpc
from services.router.access.keys import INFER
from services.router.access.scopes import RPCS, rpc_rule
from services.router.grpc_server import SERVICES
from services.router.serve import Fronts
from tests.access import with_keys
from tests.fronts import FakeCore, hanging, make_core, running, until

DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return with_keys(make_core(tmp_path), tmp_path)


@pytest.fixture
async def fronts(core: FakeCore) -> AsyncIterator[Fronts]:
    async with running(core) as started:
        yield started


def rpcs() -> list[Any]:
    """Descriptors of all methods that the server has."""
    pool = descriptor_pool.Default()
    return [method for name in SERVICES for method in pool.FindServiceByName(name).methods]


def full_name(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def status_of(channel: grpc.aio.Channel, method: Any, key: str) -> grpc.StatusCode:
    """How a call with an empty message ends, or OK once anything comes back."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    made = kinds[method.client_streaming, method.server_streaming](full_name(method))
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    call = made(iter([b""]) if method.client_streaming else b"", metadata=metadata, timeout=20)
    try:
        if not method.server_streaming:
            await call
        else:
            async for _ in call:
                break
    except grpc.aio.AioRpcError as exc:
        return exc.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


async def test_without_a_key_no_rpc_answers_but_health(fronts: Fronts, core: FakeCore) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        for method in rpcs():
            for key in ("", "mallory"):
                code = await status_of(channel, method, key)
                is_open = rpc_rule(full_name(method)).scopes is None
                assert (code is grpc.StatusCode.UNAUTHENTICATED) == (not is_open), full_name(method)
        unknown = channel.unary_unary("/pdray.v1.Inference/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert core.flow.requests == []


async def test_every_rpc_has_a_rule_and_answers_the_scopes_that_it_names(fronts: Fronts) -> None:
    names = {full_name(method) for method in rpcs()}
    assert names <= set(RPCS), "give a new RPC a rule in scopes.py"
    assert "/pdray.v1.Inference/Generate" in names
    assert "/inference.GRPCInferenceService/ModelInfer" in names
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        for method in rpcs():
            scopes = rpc_rule(full_name(method)).scopes
            code = await status_of(channel, method, "alice-key")
            allowed = scopes is None or INFER in scopes
            assert (code in DENIED) == (not allowed), (full_name(method), code)
            assert await status_of(channel, method, "ops-key") not in DENIED, full_name(method)


async def test_the_tenant_and_the_form_of_the_key(fronts: Fronts, core: FakeCore) -> None:
    async with AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}", api_key="alice-key") as client:
        assert [p async for p in client.generate("x", options=CallOptions(cache_salt="s"))]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="x"), metadata=(("x-api-key", "bob-key"),))
        assert [m async for m in call]
    assert [(r.tenant, r.salt) for r in core.flow.requests] == [("red", "s"), ("blue", "")]


async def test_limits_are_resource_exhausted_with_retry_info(fronts: Fronts) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("authorization", "Bearer slowly-key"),)
        for left in ("1", "0"):
            call = stub.Generate(inference_pb2.GenerateRequest(prompt="x"), metadata=metadata)
            assert [m async for m in call]
            assert dict(await call.trailing_metadata())["x-ratelimit-remaining-requests"] == left
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="x"), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(error.trailing_metadata() or ())
    assert trailing["pdray-error-code"] == "rate_limit_exceeded"
    assert trailing["x-ratelimit-limit-requests"] == "2"
    wait = retry_info(error)
    assert 0 < wait.retry_delay.ToMilliseconds() <= 30_000


def retry_info(error: grpc.aio.AioRpcError) -> error_details_pb2.RetryInfo:
    """Of a call's rich status, which must agree with its plain one."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(found) for detail in status.details)
    return found


async def test_running_calls_are_counted_to_their_end(fronts: Fronts, core: FakeCore) -> None:
    core.flow.script = hanging("Hi")
    async with AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}", api_key="slowly-key") as client:
        held = client.generate("x")
        await anext(held)
        with pytest.raises(RequestError, match="concurrency") as caught:
            await anext(client.generate("x"))
        assert caught.value.code is ErrorCode.RATE_LIMITED
        await held.aclose()  # type: ignore[attr-defined]
    await until(lambda: fronts.front.guard._key_meters["slowly"].running == 0)


async def test_each_request_of_an_open_inference_stream_is_counted(fronts: Fronts) -> None:
    async with AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}", api_key="slowly-key") as client:
        for _ in range(2):
            assert "".join([text async for text in client.infer_stream(["x"])]) == "Hello world"
        with pytest.raises(RequestError) as caught:
            async for _ in client.infer_stream(["x"]):
                pass
    assert caught.value.code is ErrorCode.RATE_LIMITED


async def test_abort_ends_a_tenants_own_requests_and_an_administrators_any(fronts: Fronts, core: FakeCore) -> None:
    core.flow.script = hanging("Hi")
    address = f"127.0.0.1:{fronts.grpc_port}"
    async with (
        AsyncPdrayClient(address, api_key="alice-key") as alice,
        AsyncPdrayClient(address, api_key="bob-key") as bob,
        AsyncPdrayClient(address, api_key="ops-key") as ops,
    ):
        for owner, killer in ((alice, alice), (bob, ops)):
            pieces = owner.generate("x", options=CallOptions(request_id="job-1"))
            first = await anext(pieces)
            stranger = bob if owner is alice else alice
            assert await stranger.abort("job-1") == 0
            assert await stranger.abort(first.request_id) == 0
            assert (await ops.load()).running_requests == 1
            assert await killer.abort("job-1" if killer is alice else f"cmpl-{first.request_id}") == 1
            with pytest.raises(RequestError, match="Abort") as caught:
                [piece async for piece in pieces]
            assert caught.value.code is ErrorCode.CANCELLED
            await until(lambda: len(fronts.front.running) == 0)
        with pytest.raises(RequestError, match="request_id"):
            await alice.abort("")
    assert set(core.flow.ends.values()) == {"cancelled"}
