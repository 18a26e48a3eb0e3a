"""The other RPCs: Chat, Tokenize, GetModel, GetLoad, Embed, the Open Inference Protocol, and a client by reflection."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from services.protocol.client import AsyncPdrayClient, Call, CallOptions, Message, PdrayClient, Sampling, Tool
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import inference_pb2, inference_pb2_grpc, open_inference_pb2, open_inference_pb2_grpc
from services.router.serve import Fronts
from tests.fronts import FakeCore, failing, hanging, ids_of, make_core, running, saying, saying_each, until

LENGTH = struct.Struct("<I")


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


@pytest.fixture
async def channel(fronts: Fronts) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as made:
        yield made


async def code_of(call: Any) -> ErrorCode:
    with pytest.raises(RequestError) as caught:
        await call if asyncio.iscoroutine(call) else [x async for x in call]
    return caught.value.code


# --- pdray.v1.Inference ---


async def test_a_chat_is_rendered_by_the_template_and_streams(core: FakeCore, client: AsyncPdrayClient) -> None:
    messages = [Message(role="system", content="Be kind"), Message(role="user", content="안녕 👋")]
    options = CallOptions(model="tiny", request_id="job", cache_salt="s")
    pieces = [p async for p in client.chat(messages, Sampling(temperature=0, max_tokens=50, logprobs=0), options)]
    assert "".join(p.text for p in pieces) == "Hello world"
    assert pieces[-1].usage is not None
    request = core.flow.requests[0]
    rendered = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n안녕 👋<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_ids == ids_of(rendered)
    assert (request.salt, request.label, request.sampling.shaping.logprobs) == ("s", "job", 0)
    assert await client.tokenize(messages) == request.prompt_ids


async def test_the_history_of_a_chat_may_hold_calls(core: FakeCore, client: AsyncPdrayClient) -> None:
    call = Call(call_id="c1", name="weather", arguments='{"city": "Oslo"}')
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="rain", tool_call_id="c1"),
    ]
    assert [p async for p in client.chat(messages)]
    assert await code_of(client.chat([Message(role="tool", content="rain")])) is ErrorCode.INVALID_REQUEST


async def test_calls_of_functions_stream_as_pieces(tmp_path: Path) -> None:
    core = make_core(tmp_path, max_model_len=4096)
    core.flow.script = saying('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    tool = Tool(name="weather", description="Of a city", parameters='{"type": "object"}')
    async with running(core) as fronts, AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}") as client:
        pieces = [p async for p in client.chat([Message(role="user", content="?")], tools=[tool], max_tokens=200)]
    calls = [call for p in pieces for call in p.tool_calls]
    assert {call.index for call in calls} == {0}
    assert [call.name for call in calls if call.name] == ["weather"]
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo"}
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("parameters", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 100_000])
async def test_a_tool_whose_parameters_are_no_schema_is_refused(client: AsyncPdrayClient, parameters: str) -> None:
    tools = [Tool(name="f", parameters=parameters)]
    assert await code_of(client.chat([Message(role="user", content="x")], tools=tools)) is ErrorCode.INVALID_REQUEST


async def test_what_is_wrong_with_a_chat_is_told_by_field(channel: grpc.aio.Channel) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Chat(inference_pb2.ChatRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert status is not None
    found = error_details_pb2.BadRequest()
    assert any(detail.Unpack(found) for detail in status.details)
    assert [v.field for v in found.field_violations] == ["messages"]


async def test_a_long_message_fits_into_trailers(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = failing(RequestError(ErrorCode.INVALID_REQUEST, "안" * 5000, param="안" * 500))
    error = await code_of(client.generate("x"))
    assert error is ErrorCode.INVALID_REQUEST


async def test_tokenize_gives_the_ids_that_generate_computes(core: FakeCore, client: AsyncPdrayClient) -> None:
    assert await client.tokenize("Once upon") == ids_of("Once upon")
    assert await code_of(client.tokenize("")) is ErrorCode.INVALID_REQUEST
    assert await code_of(client.tokenize("ab " * 10_000)) is ErrorCode.CONTEXT_LENGTH_EXCEEDED


async def test_the_model_and_its_load_are_told(core: FakeCore, client: AsyncPdrayClient) -> None:
    model = await client.model()
    assert (model.id, model.max_model_len, list(model.eos_token_ids)) == ("tiny", 256, [2])
    assert model.has_chat_template
    assert not model.can_embed
    load = await client.load()
    assert (load.is_ready, load.running_requests) == (True, 0)
    core.not_ready = "no workers"
    load = await client.load()
    assert (load.is_ready, load.reason) == (False, "no workers")


async def test_embeddings_are_unimplemented_with_a_reason(channel: grpc.aio.Channel, client: AsyncPdrayClient) -> None:
    assert await code_of(client.embed(["x"])) is ErrorCode.NOT_YET_SUPPORTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_pb2_grpc.InferenceStub(channel).Embed(inference_pb2.EmbedRequest(texts=["x"]))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "embeddings" in str(caught.value.details())


@pytest.mark.parametrize("model", ["no-such", "TINY", "tiny ", "x" * 5000])
async def test_another_models_name_is_not_found_on_every_rpc(channel: grpc.aio.Channel, model: str) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    oip = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    calls = [
        stub.Tokenize(inference_pb2.TokenizeRequest(model=model, text="x")),
        stub.Embed(inference_pb2.EmbedRequest(model=model)),
        oip.ModelMetadata(open_inference_pb2.ModelMetadataRequest(name=model)),
        oip.ModelInfer(infer_request("x", model=model)),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# --- the Open Inference Protocol ---


def infer_request(*texts: str, model: str = "", **parameters: Any) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name=model, id="r1")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    request.inputs[0].contents.bytes_contents.extend(text.encode() for text in texts)
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


async def test_the_server_and_its_model_are_described(core: FakeCore, channel: grpc.aio.Channel) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert (await stub.ServerLive(open_inference_pb2.ServerLiveRequest())).live
    assert (await stub.ServerReady(open_inference_pb2.ServerReadyRequest())).ready
    ready = lambda name, version="": stub.ModelReady(open_inference_pb2.ModelReadyRequest(name=name, version=version))  # noqa: E731
    assert [(await ready("tiny")).ready, (await ready("tiny", "1")).ready] == [True, True]
    assert [(await ready("tiny", "2")).ready, (await ready("other")).ready] == [False, False]
    assert (await stub.ServerMetadata(open_inference_pb2.ServerMetadataRequest())).name == "pdray"
    about = await stub.ModelMetadata(open_inference_pb2.ModelMetadataRequest(name="tiny"))
    assert [(t.name, t.datatype) for t in about.inputs] == [("text_input", "BYTES")]
    assert [t.name for t in about.outputs] == ["text_output", "finish_reason"]
    core.not_ready = "no workers"
    assert not (await stub.ServerReady(open_inference_pb2.ServerReadyRequest())).ready
    assert not (await ready("tiny")).ready
    assert (await stub.ServerLive(open_inference_pb2.ServerLiveRequest())).live


async def test_texts_come_in_contents_or_raw_and_go_out_alike(core: FakeCore, channel: grpc.aio.Channel) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    reply = await stub.ModelInfer(infer_request("one", "two", max_tokens=100))
    assert (reply.id, reply.model_name) == ("r1", "tiny")
    assert [(t.name, list(t.shape)) for t in reply.outputs] == [("text_output", [2]), ("finish_reason", [2])]
    assert list(reply.outputs[0].contents.bytes_contents) == [b"Hello world"] * 2
    assert list(reply.outputs[1].contents.bytes_contents) == [b"stop"] * 2
    raw = open_inference_pb2.ModelInferRequest()
    raw.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    raw.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    asked = json.dumps({"n": 2, "max_tokens": 50, "stop": ["world"]}).encode()
    raw.raw_input_contents.extend(LENGTH.pack(len(x)) + x for x in (b"one", asked))
    raw.outputs.add(name="text_output")
    core.flow.script = saying_each("Hello world", "Hi world")
    reply = await stub.ModelInfer(raw)
    assert [(t.name, list(t.shape)) for t in reply.outputs] == [("text_output", [2])]
    assert list(reply.raw_output_contents) == [LENGTH.pack(6) + b"Hello " + LENGTH.pack(3) + b"Hi "]


@pytest.mark.parametrize(("kind", "form"), [("INT64", "<2q"), ("INT32", "<2i"), ("UINT32", "<2I"), ("UINT64", "<2Q")])
async def test_a_prompt_may_be_ids(core: FakeCore, channel: grpc.aio.Channel, kind: str, form: str) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = open_inference_pb2.ModelInferRequest(raw_input_contents=[struct.pack(form, 5, 6)])
    request.inputs.add(name="input_ids", datatype=kind, shape=[2])
    await stub.ModelInfer(request)
    assert core.flow.requests[0].prompt_ids == (5, 6)


def broken_requests() -> list[open_inference_pb2.ModelInferRequest]:
    """One fault each."""
    requests = [infer_request("x") for _ in range(13)]
    requests[0].inputs[0].name = "image"
    requests[1].inputs[0].datatype = "FP32"
    requests[2].inputs[0].shape[0] = 2
    requests[3].inputs[0].shape[0] = -1
    requests[4].inputs[0].shape.extend([2**62, 2**62])
    requests[5].inputs[0].contents.bytes_contents[0] = b"\xff"
    requests[6].raw_input_contents.append(b"x")
    requests[7].inputs.add().CopyFrom(requests[7].inputs[0])
    requests[8].outputs.add(name="logits")
    requests[9].model_version = "7"
    requests[10].parameters["temperature"].double_param = float("nan")
    requests[11].parameters["max_tokens"].string_param = "many"
    del requests[12].inputs[:]
    raw = open_inference_pb2.ModelInferRequest(raw_input_contents=[b"\x05\x00\x00\x00ab"])
    raw.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    ids = open_inference_pb2.ModelInferRequest(raw_input_contents=[b"12345"])
    ids.inputs.add(name="input_ids", datatype="INT64", shape=[1])
    return [*requests, raw, ids]


async def test_what_is_wrong_with_tensors_is_an_invalid_argument(core: FakeCore, channel: grpc.aio.Channel) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    for i, request in enumerate(broken_requests()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, i
    assert core.flow.requests == []


async def test_a_stream_answers_request_by_request_and_outlives_an_error(channel: grpc.aio.Channel) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    requests = [infer_request("x"), infer_request("x", model="no-such"), infer_request("x", max_tokens=2)]
    replies = [r async for r in stub.ModelStreamInfer(iter(requests))]
    answers: list[list[Any]] = [[]]
    for reply in replies:
        answers[-1].append(reply)
        if reply.infer_response.parameters["triton_final_response"].bool_param:
            answers.append([])
    assert answers.pop() == []
    text = lambda answer: "".join(r.infer_response.outputs[0].contents.bytes_contents[0].decode() for r in answer)  # noqa: E731
    assert text(answers[0]) == "Hello world"
    assert [r.error_message.split(":")[0] for r in answers[1]] == ["model_not_found"]
    assert "Hello world".startswith(text(answers[2]))
    assert len(answers) == 3


async def test_cancelling_an_open_inference_call_frees_its_request(core: FakeCore, client: AsyncPdrayClient) -> None:
    core.flow.script = hanging("Hello")
    pieces = client.infer_stream(["x"])
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    whole = asyncio.create_task(client.infer(["x"]))
    await until(lambda: len(core.flow.requests) == 2)
    whole.cancel()
    await until(lambda: len(core.flow.ends) == 2)
    assert set(core.flow.ends.values()) <= {"cancelled", "closed"}


# --- clients ---


def test_the_blocking_client_has_it_all(core: FakeCore) -> None:
    def use(port: int) -> None:
        with PdrayClient(f"127.0.0.1:{port}") as client:
            assert client.is_healthy()
            assert client.is_healthy("inference.GRPCInferenceService")
            assert client.model().id == "tiny"
            assert client.load().is_ready
            assert client.tokenize("x") == ids_of("x")
            assert client.abort("nobody") == 0
            assert "".join(p.text for p in client.chat([Message(role="user", content="x")])) == "Hello world"
            assert client.infer(["x", "y"]) == ("Hello world", "Hello world")
            assert "".join(client.infer_stream(["x"], max_tokens=50, temperature=0.5)) == "Hello world"
            with pytest.raises(RequestError, match="embeddings"):
                client.embed(["x"])
            with pytest.raises(RequestError, match="does not exist"):
                list(client.infer_stream(["x"], "no-such"))

    async def main() -> None:
        async with running(core) as fronts:
            await asyncio.to_thread(use, fronts.grpc_port)

    asyncio.run(main())


async def test_a_generic_client_needs_reflection_alone(core: FakeCore, channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="pdray.v1.Inference")
    call = stub.ServerReflectionInfo(iter([asked]))
    answer = await call.read()
    call.cancel()
    pool = descriptor_pool.DescriptorPool()
    for data in answer.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    method = pool.FindServiceByName("pdray.v1.Inference").FindMethodByName("Generate")
    request = message_factory.GetMessageClass(method.input_type)(prompt="x")
    made = channel.unary_stream(
        "/pdray.v1.Inference/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    assert "".join([m.text async for m in made(request)]) == "Hello world"


@pytest.mark.parametrize("name", ["inference.GRPCInferenceService", "pdray.v1.Inference"])
async def test_each_service_has_a_health_of_its_own_name(channel: grpc.aio.Channel, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
