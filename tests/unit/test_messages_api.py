"""/v1/messages by the real `anthropic` client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio

from services.protocol.errors import ErrorCode, RequestError
from tests.fronts import FakeCore, failing, ids_of, prompt_of, saying

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def claude(http: httpx.AsyncClient) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_and_its_usage(core: FakeCore, claude: anthropic.AsyncAnthropic) -> None:
    core.flow.script = saying("Hello world", cached_tokens=4)
    answer = await claude.messages.create(model="tiny", max_tokens=50, messages=HI, system="Be brief.")
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason) == ("Hello world", "end_turn")
    assert answer.usage.cache_read_input_tokens == 4
    assert answer.usage.input_tokens == len(core.flow.requests[0].prompt_ids) - 4
    assert answer.usage.output_tokens == len(ids_of("Hello world")) + 1
    assert "system\nBe brief." in prompt_of(core)


async def test_a_streamed_message(core: FakeCore, claude: anthropic.AsyncAnthropic) -> None:
    core.flow.script = saying("안녕 world")
    async with claude.messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "안녕 world"
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.usage.output_tokens == len(ids_of("안녕 world")) + 1


async def test_events_come_in_the_documented_order(core: FakeCore, claude: anthropic.AsyncAnthropic) -> None:
    core.flow.script = saying(f"See: {CALL}")
    events = [
        e async for e in await claude.messages.create(
            model="tiny", max_tokens=200, messages=HI, tools=[TOOL], stream=True
        )
    ]  # fmt: skip
    kinds = [e.type for e in events if e.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_used_and_its_result_goes_back_in(
    core: FakeCore, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    core.flow.script = saying(f"See: {CALL}")
    given: Any = {"model": "tiny", "max_tokens": 200, "messages": HI, "tools": [TOOL]}
    if stream:
        async with claude.messages.stream(**given) as events:
            answer: Any = await events.get_final_message()
    else:
        answer = await claude.messages.create(**given)
    assert answer.stop_reason == "tool_use"
    text, use = answer.content
    assert (text.text, use.name, use.input) == ("See: ", "weather", {"city": "Rome"})
    core.flow.script = saying("Warm.")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "21 C"}]}
    content = [block.model_dump(exclude_unset=True) for block in answer.content]
    turns = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    second = await claude.messages.create(**{**given, "messages": turns})
    assert second.content[0].text == "Warm."
    assert "<tool_response>\n21 C" in prompt_of(core)


@pytest.mark.parametrize(
    ("choice", "kind"), [({"type": "any"}, "array"), ({"type": "tool", "name": "weather"}, "object")]
)
async def test_a_demanded_tool_is_forced(
    core: FakeCore, claude: anthropic.AsyncAnthropic, choice: Any, kind: str
) -> None:
    arguments = '{"city": "Rome"}'
    core.flow.script = saying(arguments if kind == "object" else f'[{{"name": "weather", "arguments": {arguments}}}]')
    answer = await claude.messages.create(model="tiny", max_tokens=200, messages=HI, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]
    grammar = core.flow.requests[0].sampling.shaping.grammar
    assert grammar is not None
    assert f'"type": "{kind}"' in grammar.text


async def test_a_stop_sequence_is_named(core: FakeCore, claude: anthropic.AsyncAnthropic) -> None:
    core.flow.script = saying("one two three")
    answer = await claude.messages.create(model="tiny", max_tokens=50, messages=HI, stop_sequences=["two"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    cut = await claude.messages.create(model="tiny", max_tokens=1, messages=HI)
    assert cut.stop_reason == "max_tokens"


async def test_errors_have_their_form_before_and_after_the_first_byte(
    core: FakeCore, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model="tiny", max_tokens=0, messages=HI)
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="other", max_tokens=5, messages=HI)
    core.flow.script = failing(RequestError(ErrorCode.NO_WORKERS, "nobody"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        await claude.messages.create(model="tiny", max_tokens=5, messages=HI, stream=True)
    assert caught.value.status_code == 503
    core.flow.script = failing(RequestError(ErrorCode.WORKER_LOST, "it is gone"), after="Hello")
    with pytest.raises(anthropic.APIStatusError, match="it is gone"):
        _ = [e async for e in await claude.messages.create(model="tiny", max_tokens=50, messages=HI, stream=True)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages is missing"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image input is not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "going on with"),
        ({"messages": HI, "tool_choice": {"type": "never"}}, "tool_choice.type"),
        ({"messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking is not supported"),
        ({"messages": HI, "stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_what_is_refused_says_why(
    core: FakeCore, http: httpx.AsyncClient, body: dict[str, Any], words: str
) -> None:
    reply = await http.post(PATH, json={"max_tokens": 5, **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert words in reply.json()["error"]["message"]
    assert core.flow.requests == []


async def test_tokens_are_counted_without_computing(core: FakeCore, claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model="tiny", messages=HI)
    answer = await claude.messages.create(model="tiny", max_tokens=5, messages=HI)
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(core.flow.requests) == 1
