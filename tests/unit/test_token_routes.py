"""/tokenize, /detokenize, and the routes that the served model cannot fill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from services.router.serve import Fronts
from tests.fronts import FakeCore, client_of, error_of, events_of, ids_of, make_core, running, saying, tokenizer

HI: Any = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCore, Fronts]]:
    """One router for all tests of this file; its model wants a start token."""
    core = make_core(tmp_path_factory.mktemp("model"), model={"max_model_len": 2000}, max_model_len=2000, add_bos=True)
    async with running(core) as fronts:
        yield core, fronts


async def test_a_prompt_is_tokenized_as_a_completion_would_be(core: FakeCore, http: httpx.AsyncClient) -> None:
    reply = (await http.post("/tokenize", json={"prompt": "Hello 한", "return_token_strs": True})).json()
    assert reply["tokens"] == [1, *ids_of("Hello 한")]
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 2000
    await http.post("/v1/completions", json={"prompt": "Hello 한"})
    assert list(core.flow.requests[0].prompt_ids) == reply["tokens"]
    bare = await http.post("/tokenize", json={"prompt": "Hello 한", "add_special_tokens": False})
    assert bare.json()["tokens"] == reply["tokens"][1:]
    assert bare.json()["token_strs"] is None


async def test_a_chat_is_tokenized_as_it_would_be_answered(core: FakeCore, http: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body in ({"messages": HI}, {"messages": HI, "tools": tools}, {"messages": HI, "add_generation_prompt": False}):
        tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert list(core.flow.requests[-1].prompt_ids) == tokens
    assert not tokenizer().decode(tokens, skip_special_tokens=False).endswith("assistant\n")


async def test_ids_become_text_again(http: httpx.AsyncClient) -> None:
    text = "Hello 한국어 👨‍👩‍👧‍👦"
    assert (await http.post("/detokenize", json={"tokens": ids_of(text)})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 2001}, "tokens"),
        ("/v1/embeddings", {}, "input"),
        ("/score", {"text_1": "x"}, "text_2"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    reply = await http.post(path, json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)


async def test_embeddings_and_scores_are_refused_with_the_reason(
    http: httpx.AsyncClient, sdk: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="hidden states") as caught:
        await sdk.embeddings.create(model="tiny", input="x")
    assert caught.value.code == "not_yet_supported"
    for path in ("/score", "/v1/score"):
        reply = await http.post(path, json={"text_1": "x", "text_2": ["y", "z"]})
        assert (reply.status_code, error_of(reply)["code"]) == (400, "not_yet_supported")


async def test_models_by_the_client(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await sdk.models.list()] == ["tiny"]
    assert (await sdk.models.retrieve("tiny")).owned_by == "pdray"
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("other")


# --- fields beside the API's own ---


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})]
)
async def test_token_ids_are_told_where_they_are_asked_for(
    core: FakeCore, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    core.flow.script = saying("Hello 한국어", at_once=2)
    whole = (await http.post(path, json={**body, "return_token_ids": True})).json()
    choice = whole["choices"][0]
    ids = choice["token_ids"]
    assert tuple(ids[:-1]) == ids_of("Hello 한국어")
    prompt_ids = list(core.flow.requests[0].prompt_ids)
    assert (whole if "chat" in path else choice)["prompt_token_ids"] == prompt_ids
    reply = await http.post(path, json={**body, "return_token_ids": True, "stream": True})
    chunks = events_of(reply.text)[:-1]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    holders = [chunk if "chat" in path else chunk["choices"][0] for chunk in chunks]
    assert [h["prompt_token_ids"] for h in holders if "prompt_token_ids" in h] == [prompt_ids]


async def test_variables_reach_templates_that_read_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = "{{ reasoning_effort | default('none') }} {{ enable_thinking }} {{ messages[0].content }}"
    core = make_core(tmp_path_factory.mktemp("model"), chat_template=template)
    async with running(core) as fronts, client_of(fronts) as http:
        body = {"messages": HI, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        bad = await http.post("/v1/chat/completions", json={"messages": HI, "chat_template_kwargs": {"messages": []}})
        assert (bad.status_code, error_of(bad)["param"]) == (400, "chat_template_kwargs")
    assert tokenizer().decode(list(core.flow.requests[0].prompt_ids)) == "low False Hi"


@pytest.mark.parametrize("field", ["chat_template", "kv_transfer_params", "vllm_xargs"])
async def test_what_will_never_be_there_says_why(http: httpx.AsyncClient, field: str) -> None:
    reply = await http.post("/v1/chat/completions", json={"messages": HI, field: {"a": 1}})
    assert (reply.status_code, error_of(reply)["param"]) == (400, field)
