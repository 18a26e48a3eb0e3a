"""The OpenAI API over real sockets, with a scripted flow behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from services.router.types import DONE, FIRST_BYTE, TOKENIZED
from tests.fronts import (
    FakeCore,
    client_of,
    events_of,
    ids_of,
    make_core,
    running,
    saying,
    tokenizer,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCore, httpx.AsyncClient]]:
    """One router for all tests of this file."""
    core = make_core(tmp_path_factory.mktemp("model"))
    async with running(core) as fronts, client_of(fronts) as client:
        yield core, client


@pytest.fixture
def core(served: tuple[FakeCore, httpx.AsyncClient]) -> FakeCore:
    served[0].forget()
    return served[0]


@pytest.fixture
def http(served: tuple[FakeCore, httpx.AsyncClient]) -> httpx.AsyncClient:
    return served[1]


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- answers ---


async def test_a_chat_answer_is_what_the_sdk_expects(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying("Hello world", cached_tokens=3)
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, temperature=0)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.model, answer.object) == ("tiny", "chat.completion")
    usage, prompt = answer.usage, ids_of("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ids_of("Hello world")) + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    request = core.flow.requests[0]
    assert (request.prompt_ids, request.sampling.temperature) == (prompt, 0.0)
    assert request.sampling.max_tokens == 256 - len(prompt)


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_a_streamed_chat_joins_to_the_whole_one(core: FakeCore, sdk: openai.AsyncOpenAI, at_once: int) -> None:
    text = "한국어 नमस्ते 👨‍👩‍👧‍👦 and ASCII"
    core.flow.script = saying(text, at_once=at_once)
    chunks = [c async for c in await sdk.chat.completions.create(model="tiny", messages=HI, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1


async def test_usage_comes_last_and_only_if_asked(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await http.post(CHAT, json=body)).text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(ids_of("Hello world")) + 1
    assert all(event["usage"] is None for event in events[:-2])
    plain = events_of((await http.post(CHAT, json={"messages": HI, "stream": True})).text)
    assert all("usage" not in event for event in plain[:-1])
    whole = (await http.post(CHAT, json={"messages": HI})).json()
    assert whole["usage"] == events[-2]["usage"]


async def test_a_completion_takes_text_and_ids_alike(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(" there")
    by_text = await sdk.completions.create(model="tiny", prompt="Once upon", max_tokens=5)
    by_ids = await sdk.completions.create(model="tiny", prompt=list(ids_of("Once upon")), max_tokens=5)
    assert by_text.choices[0].text == by_ids.choices[0].text == " there"
    assert core.flow.requests[0].prompt_ids == core.flow.requests[1].prompt_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_give_a_choice_each(core: FakeCore, http: httpx.AsyncClient, stream: bool) -> None:
    async def say_prompt(request: Any) -> AsyncIterator[Any]:
        async for event in saying(f"<{len(request.prompt_ids)}>")(request):
            yield event

    core.flow.script = say_prompt
    body = {"prompt": [[5] * n for n in (1, 2, 3)], "stream": stream}
    response = await http.post(TEXT, json=body)
    texts, reasons = ["", "", ""], ["", "", ""]
    documents = events_of(response.text)[:-1] if stream else [response.json()]
    for choice in (c for document in documents for c in document["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert (texts, reasons) == (["<1>", "<2>", "<3>"], ["stop"] * 3)
    assert len({r.request_id for r in core.flow.requests}) == 3
    if not stream:
        assert response.json()["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(core: FakeCore, http: httpx.AsyncClient, stream: bool) -> None:
    core.flow.script = saying(" world")
    response = await http.post(TEXT, json={"prompt": "Hello", "echo": True, "stream": stream})
    documents = events_of(response.text)[:-1] if stream else [response.json()]
    assert "".join(d["choices"][0]["text"] for d in documents) == "Hello world"


async def test_echo_with_no_tokens_computes_nothing(core: FakeCore, http: httpx.AsyncClient) -> None:
    answer = (await http.post(TEXT, json={"prompt": "Hello", "echo": True, "max_tokens": 0})).json()
    assert answer["choices"][0] == {"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert core.flow.requests == []


@pytest.mark.parametrize("at_once", [1, 4])
async def test_every_stop_over_a_token_border_cuts_both_modes_alike(
    core: FakeCore, http: httpx.AsyncClient, at_once: int
) -> None:
    text = "The quick brown fox, and then 한국어."
    core.flow.script = saying(text, at_once=at_once)
    ids = ids_of(text)
    borders = sorted({len(_decoded(ids[:count]).rstrip("\ufffd")) for count in range(1, len(ids))})
    for border in borders[2:-2:3]:
        stop = text[border - 1 : border + 2]
        body = {"prompt": "x", "stop": stop}
        whole = (await http.post(TEXT, json=body)).json()
        streamed = events_of((await http.post(TEXT, json={**body, "stream": True})).text)[:-1]
        expected = text[: text.index(stop)]
        assert whole["choices"][0]["text"] == "".join(e["choices"][0]["text"] for e in streamed) == expected
        assert whole["choices"][0]["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == "stop"
        assert core.flow.ends[core.flow.requests[-1].request_id] == "closed"
        needed = next(n for n in range(1, len(ids) + 1) if stop in _decoded(ids[:n]))
        assert whole["usage"]["completion_tokens"] == needed


def _decoded(ids: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(ids)))


async def test_what_looked_like_a_stop_is_released_at_the_end(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = saying("one two thr")
    body = {"prompt": "x", "stop": ["three"]}
    assert (await http.post(TEXT, json=body)).json()["choices"][0]["text"] == "one two thr"
    streamed = events_of((await http.post(TEXT, json={**body, "stream": True})).text)[:-1]
    assert "".join(e["choices"][0]["text"] for e in streamed) == "one two thr"


async def test_min_tokens_holds_back_stop_strings(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = saying("aXbXc")
    count = len(ids_of("aX"))
    body = {"prompt": "x", "stop": "X", "min_tokens": count}
    assert (await http.post(TEXT, json=body)).json()["choices"][0]["text"] == "aXb"


async def test_an_end_token_that_has_text_is_left_out(core: FakeCore, http: httpx.AsyncClient) -> None:
    end = ids_of("the fox")[-1]
    core.flow.script = saying("the fox")
    response = await http.post(TEXT, json={"prompt": "x", "stop_token_ids": [end]})
    assert response.json()["choices"][0]["text"] == _decoded(ids_of("the fox")[:-1])
    assert core.flow.requests[0].sampling.stop_token_ids == (end,)


# --- ids, headers, timelines ---


async def test_a_request_id_is_echoed_clean_or_made(core: FakeCore, http: httpx.AsyncClient) -> None:
    given = await http.post(CHAT, json={"messages": HI}, headers={"x-request-id": b"job-7 <b>\xfc" + b"x" * 500})
    assert given.headers["x-request-id"].startswith("job-7b")
    assert len(given.headers["x-request-id"]) == 128
    made = await http.post(CHAT, json={"messages": HI})
    assert made.json()["id"] == f"chatcmpl-{made.headers['x-request-id']}"
    assert "x-request-id" in (await http.get("/nothing")).headers


async def test_one_client_id_for_many_requests_is_only_a_label(core: FakeCore, http: httpx.AsyncClient) -> None:
    async def one(n: int) -> Any:
        return (await http.post(TEXT, json={"prompt": [5] * n}, headers={"x-request-id": "same"})).json()

    answers = await asyncio.gather(*(one(n) for n in range(1, 11)))
    assert [a["usage"]["prompt_tokens"] for a in answers] == list(range(1, 11))
    assert len({a["id"] for a in answers}) == 10
    assert (await http.get("/debug/requests/same")).json()["label"] == "same"


async def test_unknown_fields_are_ignored_with_a_warning(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={"messages": HI, "wibble": 1, "wöbble\r\nx: y": 2, "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-pdray-ignored"] == "wibble, w?bble??x: y"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeline_has_every_mark_in_order_and_closes(
    core: FakeCore, http: httpx.AsyncClient, stream: bool
) -> None:
    response = await http.post(CHAT, json={"messages": HI, "stream": stream}, headers={"x-request-id": "tl"})
    assert response.status_code == 200
    timeline = (await http.get("/debug/requests/tl")).json()
    assert timeline["outcome"] == "ok"
    names = [e["name"] for e in timeline["events"]]
    assert names == ["accept", TOKENIZED, FIRST_BYTE, DONE]
    assert timeline["ttft_ms"] <= timeline["e2e_ms"]
    with_prefix = await http.get(f"/debug/requests/chatcmpl-{timeline['request_id']}")
    assert with_prefix.json()["request_id"] == timeline["request_id"]


async def test_a_refused_request_closes_its_timeline_with_the_code(core: FakeCore, http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json={"messages": []}, headers={"x-request-id": "bad"})
    await http.post(TEXT, json={"prompt": [5] * 300}, headers={"x-request-id": "long"})
    assert core.request_debug("bad")["outcome"] == "invalid_request"  # type: ignore[index]
    assert core.request_debug("long")["outcome"] == "context_length_exceeded"  # type: ignore[index]


async def test_sampling_reaches_the_flow(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -1, "max_tokens": 9, "min_tokens": 2}
    body |= {"ignore_eos": True, "stop_token_ids": [4], "cache_salt": "s", "priority": -3}
    assert (await http.post(CHAT, json={"messages": HI, **body})).status_code == 200
    request = core.flow.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, -1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 2, True)
    assert (sampling.stop_token_ids, request.salt, request.priority) == ((4,), "s", -3)
