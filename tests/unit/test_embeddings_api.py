"""/v1/embeddings, /score and the RPC Embed over a scripted flow: shapes, order, limits, errors and ends."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import struct
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from services.access_config import LimitsConfig
from services.protocol.client import AsyncPdrayClient
from services.protocol.errors import ErrorCode, RequestError
from services.router.embedding import AT_ONCE
from services.router.serve import Fronts
from tests.fronts import FakeCore, client_of, error_of, failing, hanging, ids_of, make_core, pooling, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = {"Hello": (3.0, 4.0), "world": (0.0, 2.0), "fox": (-3.0, -4.0)}
UNIT = {"Hello": [0.6, 0.8], "world": [0.0, 1.0], "fox": [-0.6, -0.8]}


@pytest.fixture
def core(served: tuple[FakeCore, Fronts]) -> FakeCore:
    core = served[0]
    core.forget()
    core.width = 2
    core.flow.script = pooling({ids_of(text): state for text, state in TEXTS.items()})
    return core


def near(vector: list[float]) -> Any:
    return pytest.approx(vector, rel=1e-6)


async def test_the_client_gets_vectors_of_length_one_in_the_order_of_its_texts(
    core: FakeCore, sdk: openai.AsyncOpenAI
) -> None:
    texts = ["Hello", "world", "fox", "Hello"]
    reply = await sdk.embeddings.create(model="tiny", input=texts)
    assert [entry.index for entry in reply.data] == [0, 1, 2, 3]
    assert [entry.embedding for entry in reply.data] == [near(UNIT[text]) for text in texts]
    tokens = sum(len(ids_of(text)) for text in texts)
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("tiny", tokens, tokens)
    assert all(request.pools and request.sampling.max_tokens == 1 for request in core.flow.requests)
    assert len({request.request_id for request in core.flow.requests}) == 4


@pytest.mark.parametrize(
    "given", ["Hello", ["Hello"], ids_of("Hello"), [ids_of("Hello")]], ids=["text", "texts", "ids", "lists of ids"]
)
async def test_every_form_of_input_is_taken(core: FakeCore, http: httpx.AsyncClient, given: Any) -> None:
    reply = (await http.post("/v1/embeddings", json={"input": given})).json()
    assert reply["data"][0]["embedding"] == near([0.6, 0.8])
    assert set(reply) == {"object", "data", "model", "usage"}


async def test_base64_holds_the_same_floats(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"input": ["Hello", "world"]}
    plain = (await http.post("/v1/embeddings", json={**body, "encoding_format": "float"})).json()
    packed = (await http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    for a, b in zip(plain["data"], packed["data"], strict=True):
        assert list(struct.unpack("<2f", base64.b64decode(b["embedding"]))) == a["embedding"]


async def test_the_mean_itself_is_told_where_it_is_asked_for(core: FakeCore, http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/embeddings", json={"input": "Hello", "normalize": False})
    assert reply.json()["data"][0]["embedding"] == [3.0, 4.0]


async def test_a_state_of_zeros_stays_zeros(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = pooling({ids_of("Hello"): (0.0, 0.0)})
    reply = await http.post("/v1/embeddings", json={"input": "Hello"})
    assert reply.json()["data"][0]["embedding"] == [0.0, 0.0]


async def test_scores_are_cosines(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"text_1": "Hello", "text_2": ["Hello", "world", "fox"]}
    for path in ("/score", "/v1/score"):
        reply = (await http.post(path, json=body)).json()
        assert [(x["index"], x["object"]) for x in reply["data"]] == [(i, "score") for i in range(3)]
        assert [x["score"] for x in reply["data"]] == near([1.0, 0.8, -1.0])
        assert reply["object"] == "list"
        assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0
    assert len(core.flow.requests) == 8  # text_1 is computed once, not for each pair
    pairs = {"text_1": ["Hello", "world"], "text_2": ["fox", "world"]}
    reply = (await http.post("/score", json=pairs)).json()
    assert [x["score"] for x in reply["data"]] == near([-1.0, 1.0])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["Hello", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["Hello", 5]}, "input[1]"),
        ("/v1/embeddings", {"input": ["Hello", []]}, "input[1]"),
        ("/v1/embeddings", {"input": [1, "Hello"]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [10**6]]}, "input[1][0]"),
        ("/v1/embeddings", {"input": [True]}, "input[0]"),
        ("/v1/embeddings", {"input": "Hello", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "Hello", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "Hello", "dimensions": 1}, "dimensions"),
        ("/v1/embeddings", {"input": "Hello", "normalize": "yes"}, "normalize"),
        ("/v1/embeddings", {"input": "Hello", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": [[1] * 2001]}, "input[0]"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [["b"]]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a"] * 2049, "text_2": "b"}, "text_1"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_is_computed(
    core: FakeCore, http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    reply = await http.post(path, json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)
    assert not core.flow.requests


async def test_the_models_own_size_may_be_asked_for(core: FakeCore, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/embeddings", json={"input": "Hello", "dimensions": 2})).status_code == 200
    error = error_of(await http.post("/v1/embeddings", json={"input": "Hello", "dimensions": 3}))
    assert "matryoshka" in error["message"]


async def test_a_long_list_of_token_ids_is_one_text(core: FakeCore, http: httpx.AsyncClient) -> None:
    ids = (5,) * 1999
    core.flow.script = pooling({ids: (1.0, 0.0)})
    reply = await http.post("/v1/embeddings", json={"input": ids})
    assert reply.json()["usage"]["prompt_tokens"] == 1999


async def test_tokens_of_all_texts_together_have_a_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    core = make_core(tmp_path_factory.mktemp("model"))
    core.config = dataclasses.replace(core.config, limits=LimitsConfig(text_tokens=10))
    core.width = 2
    core.flow.script = pooling({(7,) * 5: (1.0, 0.0)})
    async with running(core) as fronts, client_of(fronts) as http:
        assert (await http.post("/v1/embeddings", json={"input": [[7] * 5, [7] * 5]})).status_code == 200
        reply = await http.post("/v1/embeddings", json={"input": [[7] * 5, [7] * 5, [7]]})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "input[2]")
    assert "limits.text_tokens" in error_of(reply)["message"]


async def test_many_texts_take_turns_and_each_gets_its_own_vector(core: FakeCore, http: httpx.AsyncClient) -> None:
    at_once = most = 0
    scripted = core.flow.script

    async def counting(request: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            async for event in scripted(request):
                yield event
        finally:
            at_once -= 1

    core.flow.script = counting
    texts = ["Hello", "world", "fox"] * 50
    reply = (await http.post("/v1/embeddings", json={"input": texts})).json()
    assert [entry["embedding"] for entry in reply["data"]] == [near(UNIT[text]) for text in texts]
    assert most == AT_ONCE


async def test_the_first_error_ends_all(core: FakeCore, http: httpx.AsyncClient) -> None:
    scripted, bad = core.flow.script, failing(RequestError(ErrorCode.NEVER_FITS, "too large"))
    core.flow.script = lambda request: (bad if request.prompt_ids == ids_of("fox") else hanging())(request)
    reply = await http.post("/v1/embeddings", json={"input": ["Hello", "fox", "world"]})
    assert error_of(reply)["code"] == str(ErrorCode.NEVER_FITS)
    await until(lambda: len(core.flow.ends) == len(core.flow.requests))
    assert sorted(core.flow.ends.values()) in (["cancelled", "error"], ["cancelled", "cancelled", "error"])
    core.flow.script = scripted


async def test_a_worker_without_states_is_an_error_and_not_a_vector(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = pooling({ids_of("Hello"): ()})
    assert (await http.post("/v1/embeddings", json={"input": "Hello"})).status_code == 500


async def test_a_client_that_leaves_frees_its_texts(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = hanging()
    task = asyncio.create_task(http.post("/v1/embeddings", json={"input": ["Hello", "world"]}))
    await until(lambda: len(core.flow.requests) == 2)
    task.cancel()
    await until(lambda: len(core.flow.ends) == 2)
    assert set(core.flow.ends.values()) <= {"closed", "cancelled"}


async def test_the_timeline_of_a_request_is_closed(core: FakeCore, http: httpx.AsyncClient) -> None:
    await http.post("/v1/embeddings", json={"input": "Hello"}, headers={"X-Request-Id": "mine"})
    shown = core.request_debug("mine")
    assert shown is not None
    assert shown["outcome"] == "ok"
    core.width = 0
    reply = await http.post("/v1/embeddings", json={"input": "Hello"}, headers={"X-Request-Id": "other"})
    assert (reply.status_code, error_of(reply)["code"]) == (400, "not_yet_supported")
    shown = core.request_debug("other")
    assert shown is not None
    assert shown["outcome"] == "not_yet_supported"


async def test_unknown_fields_are_named(core: FakeCore, http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/embeddings", json={"input": "Hello", "user": "u", "colour": 1})
    assert reply.headers["x-pdray-ignored"] == "colour"


async def test_the_rpc_gives_the_same_vectors(core: FakeCore, served: tuple[FakeCore, Fronts]) -> None:
    async with AsyncPdrayClient(f"127.0.0.1:{served[1].grpc_port}") as client:
        vectors = await client.embed(["Hello", "fox"])
        assert [list(v) for v in vectors] == [near([0.6, 0.8]), near([-0.6, -0.8])]
        assert await client.embed([ids_of("world")]) == ((0.0, 1.0),)
        assert await client.embed(["Hello"], normalize=False) == ((3.0, 4.0),)
        assert (await client.model()).can_embed
        with pytest.raises(RequestError) as caught:
            await client.embed([])
        assert caught.value.code is ErrorCode.INVALID_REQUEST


async def test_abort_ends_a_running_text(core: FakeCore, served: tuple[FakeCore, Fronts]) -> None:
    core.flow.script = hanging()
    address = f"127.0.0.1:{served[1].grpc_port}"
    async with AsyncPdrayClient(address) as client, client_of(served[1]) as http, grpc.aio.insecure_channel(address):
        task = asyncio.create_task(http.post("/v1/embeddings", json={"input": "Hello"}, headers={"X-Request-Id": "it"}))
        await until(lambda: bool(core.flow.requests))
        assert await client.abort("it") == 1
        assert (await task).status_code >= 400
