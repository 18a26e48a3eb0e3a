"""Calls and registrations are believed only with the application's secret, and calls only for half a minute."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.protocol import auth
from services.protocol.proto import worker_pb2, worker_pb2_grpc

METHOD = "/pdray.worker.v1.Worker/Abort"


def test_a_signed_call_is_believed_within_its_window_and_for_its_method_only() -> None:
    header = auth.sign_call("secret", METHOD, 1000.0)
    assert auth.verify_call("secret", METHOD, header, 1000.0 + auth.WINDOW_S - 1)
    assert not auth.verify_call("secret", METHOD, header, 1000.0 + auth.WINDOW_S + 1)
    assert not auth.verify_call("secret", METHOD, header, 1000.0 - auth.WINDOW_S - 1)
    assert not auth.verify_call("secret", METHOD + "x", header, 1000.0)
    assert not auth.verify_call("other", METHOD, header, 1000.0)


@pytest.mark.parametrize("junk", ["", "1", "1.2", "x.y.z", "1.2.3.4", "9" * 400 + ".a.b", "-5.a.b"])
def test_a_malformed_header_is_refused_without_an_error(junk: str) -> None:
    assert not auth.verify_call("secret", METHOD, junk, 1000.0)


def test_no_two_headers_are_equal_and_none_holds_the_secret() -> None:
    headers = {auth.sign_call("s3cr3t-value", METHOD, 1000.0) for _ in range(100)}
    assert len(headers) == 100
    assert not any("s3cr3t-value" in h for h in headers)


def test_every_field_of_a_registration_is_under_the_signature() -> None:
    registration = worker_pb2.Registration(worker_id="p0", role="prefill", epoch="e1", address="127.0.0.1:1")
    auth.sign_registration(registration, "secret")
    assert auth.verify_registration(registration, "secret")
    assert not auth.verify_registration(registration, "other")
    for field, value in (("address", "127.0.0.1:2"), ("epoch", "e2"), ("draining", True), ("pid", 7)):
        changed = worker_pb2.Registration()
        changed.CopyFrom(registration)
        setattr(changed, field, value)
        assert not auth.verify_registration(changed, "secret"), field


class _Worker(worker_pb2_grpc.WorkerServicer):
    async def Describe(self, request: object, context: object) -> worker_pb2.Registration:
        return worker_pb2.Registration(worker_id="here")

    async def Attach(self, requests, context):  # type: ignore[no-untyped-def]
        async for message in requests:
            yield worker_pb2.WorkerMessage(seq=message.last_seq)


@pytest.fixture
async def address():  # type: ignore[no-untyped-def]
    server = grpc.aio.server(interceptors=[auth.CallAuth("secret")], options=auth.SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_channel_with_the_secret_may_call_and_stream(address: str) -> None:
    channel = auth.channel(address, "secret")
    stub = worker_pb2_grpc.WorkerStub(channel)
    assert (await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).worker_id == "here"
    call = stub.Attach(timeout=5)
    await call.write(worker_pb2.RouterMessage(last_seq=4))
    assert (await call.read()).seq == 4
    call.cancel()
    await channel.close()


@pytest.mark.parametrize("secret", ["wrong", None])
async def test_a_channel_without_the_secret_gets_nothing(address: str, secret: str | None) -> None:
    channel = auth.channel(address, secret) if secret else grpc.aio.insecure_channel(address)
    stub = worker_pb2_grpc.WorkerStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    call = stub.Attach(timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await channel.close()


def test_a_worker_without_a_secret_does_not_start() -> None:
    with pytest.raises(ValueError, match="secret"):
        auth.CallAuth("")
