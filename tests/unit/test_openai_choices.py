"""Several choices of one prompt over HTTP and gRPC, with a scripted flow behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from services.protocol.client import AsyncPdrayClient
from services.protocol.errors import ErrorCode, RequestError
from services.router.serve import Fronts
from tests.fronts import FakeCore, error_of, events_of, ids_of, make_core, running, saying_each

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: Any = [{"role": "user", "content": "Hi"}]
TEXTS = ("one two three", "four", "five six 한국어")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCore, Fronts]]:
    """One router for all tests of this file."""
    core = make_core(tmp_path_factory.mktemp("model"), router={"max_n": 4})
    async with running(core) as fronts:
        yield core, fronts


@pytest.fixture
def core(served: tuple[FakeCore, Fronts]) -> FakeCore:
    served[0].forget()
    served[0].flow.script = saying_each(*TEXTS)
    return served[0]


def joined(bodies: list[Any], part: str) -> dict[int, str]:
    """Texts of a stream by index; checks that nothing follows a finish_reason."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for body in bodies:
        for choice in body["choices"]:
            assert choice["index"] not in ended
            text = choice["delta"].get("content", "") if part == "delta" else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == set(texts)
    return texts


async def test_a_chat_gives_each_choice_its_index_text_and_end(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, n=3, max_tokens=100)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == list(TEXTS)
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    (request,) = core.flow.requests
    assert request.n == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.completion_tokens == sum(len(ids_of(text)) + 1 for text in TEXTS)


async def test_a_streamed_chat_opens_and_ends_each_choice(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"messages": HI, "n": 3, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
    *chunks, usage, done = events_of((await http.post(CHAT, json=body)).text)
    assert done == "[DONE]"
    assert joined(chunks, "delta") == dict(enumerate(TEXTS))
    opened = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["delta"].get("role") == "assistant"]
    assert sorted(opened) == [0, 1, 2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == sum(len(ids_of(text)) + 1 for text in TEXTS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_prompts_times_choices_are_numbered_prompt_by_prompt(
    core: FakeCore, http: httpx.AsyncClient, stream: bool, echo: bool
) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "stream": stream, "echo": echo, "max_tokens": 100}
    reply = await http.post(TEXT, json=body)
    expected = [("ab" if echo else "") + TEXTS[0], ("ab" if echo else "") + TEXTS[1]]
    expected += [("cd" if echo else "") + TEXTS[0], ("cd" if echo else "") + TEXTS[1]]
    if stream:
        assert joined(events_of(reply.text)[:-1], "text") == dict(enumerate(expected))
    else:
        choices = reply.json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["text"] for c in choices] == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_choice_alone(core: FakeCore, http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "x", "n": 3, "stop": ["two"], "stream": stream, "max_tokens": 100}
    reply = await http.post(TEXT, json=body)
    texts = joined(events_of(reply.text)[:-1], "text") if stream else None
    texts = texts or {c["index"]: c["text"] for c in reply.json()["choices"]}
    assert texts == {0: "one ", 1: TEXTS[1], 2: TEXTS[2]}
    assert core.flow.ended_choices == [0]
    assert list(core.flow.ends.values()) == ["done"]


async def test_a_stop_string_in_the_last_open_choice_closes_the_request(
    core: FakeCore, http: httpx.AsyncClient
) -> None:
    core.flow.script = saying_each("four", "one two three")
    reply = await http.post(TEXT, json={"prompt": "x", "n": 2, "stop": ["two"], "max_tokens": 100})
    assert [c["text"] for c in reply.json()["choices"]] == ["four", "one "]
    assert core.flow.ended_choices == []
    assert list(core.flow.ends.values()) == ["closed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_end_by_length_by_themselves(core: FakeCore, http: httpx.AsyncClient, stream: bool) -> None:
    limit = len(ids_of(TEXTS[1])) + 1
    body = {"messages": HI, "n": 2, "max_tokens": limit, "stream": stream}
    reply = await http.post(CHAT, json=body)
    if stream:
        ends = [c["choices"][0] for c in events_of(reply.text)[:-1] if c["choices"][0]["finish_reason"]]
        assert {c["index"]: c["finish_reason"] for c in ends} == {0: "length", 1: "stop"}
    else:
        assert [c["finish_reason"] for c in reply.json()["choices"]] == ["length", "stop"]


async def test_echo_without_tokens_gives_every_choice_the_prompt(core: FakeCore, http: httpx.AsyncClient) -> None:
    reply = await http.post(TEXT, json={"prompt": "ab", "n": 2, "echo": True, "max_tokens": 0})
    assert [c["text"] for c in reply.json()["choices"]] == ["ab", "ab"]
    assert core.flow.requests == []


@pytest.mark.parametrize("n", [0, -1, 5, 2**40])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_of_choices_out_of_range_is_refused(
    core: FakeCore, http: httpx.AsyncClient, n: int, stream: bool
) -> None:
    reply = await http.post(CHAT, json={"messages": HI, "n": n, "stream": stream})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "n"
    assert core.flow.requests == []
    if n == 5:
        assert error_of(reply)["message"] == "n is 5, at most 4 are allowed (router.max_n)"


async def test_grpc_names_the_choice_and_tells_the_usage_last(core: FakeCore, served: tuple[FakeCore, Fronts]) -> None:
    async with AsyncPdrayClient(f"127.0.0.1:{served[1].grpc_port}") as client:
        pieces = [piece async for piece in client.generate("x", n=3, max_tokens=100)]
        with pytest.raises(RequestError, match=r"router\.max_n") as caught:
            _ = [piece async for piece in client.generate("x", n=5)]
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    texts = {c: "".join(p.text for p in pieces if p.choice == c) for c in range(3)}
    assert texts == dict(enumerate(TEXTS))
    assert {p.choice: p.finish_reason for p in pieces if p.finish_reason} == dict.fromkeys(range(3), "stop")
    assert [p.usage is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_an_error_of_one_choice_is_the_requests(core: FakeCore, http: httpx.AsyncClient) -> None:
    async def fails(_request: Any) -> AsyncIterator[Any]:
        raise RequestError(ErrorCode.INTERNAL, "broken")
        yield

    core.flow.script = fails
    reply = await http.post(CHAT, json={"messages": HI, "n": 2})
    assert reply.status_code == 500


async def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router\.max_n"):
        make_core(tmp_path, router={"max_n": 0})
