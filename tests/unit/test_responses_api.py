"""/v1/responses by the real client: text, events in order, tools, formats, and what needs a store."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from services.protocol.errors import ErrorCode, RequestError
from tests.fronts import FakeCore, error_of, failing, ids_of, prompt_of, saying

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_text_in_text_out(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying("Hello world", cached_tokens=3)
    answer = await sdk.responses.create(model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == "Hello world"
    assert (answer.status, answer.instructions, answer.metadata) == ("completed", "Be brief.", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens == len(ids_of("Hello world")) + 1
    assert "system\nBe brief." in prompt_of(core)


async def test_events_come_in_the_documented_order(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying("안녕 world")
    events = [e async for e in await sdk.responses.create(model="tiny", input="Hi", stream=True)]
    kinds = [e.type for e in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "안녕 world"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "안녕 world"


async def test_an_answer_cut_by_its_limit_is_incomplete(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = [e async for e in await sdk.responses.create(model="tiny", input="Hi", max_output_tokens=2, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_an_empty_answer_is_an_empty_message(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying("")
    answer = await sdk.responses.create(model="tiny", input="Hi")
    assert (answer.output_text, len(answer.output)) == ("", 1)


async def test_calls_are_items_of_their_own(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(f"Let me see. {CALL}")
    answer = await sdk.responses.create(model="tiny", input="Rome?", tools=[TOOL])
    assert [item.type for item in answer.output] == ["message", "function_call"]
    call = answer.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rome"}, "completed")
    events = [e async for e in await sdk.responses.create(model="tiny", input="Rome?", tools=[TOOL], stream=True)]
    kinds = list(dict.fromkeys(e.type for e in events))
    assert kinds[-4:] == [
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert done.output_index == 1


async def test_a_turn_with_calls_goes_back_in(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(CALL)
    first = await sdk.responses.create(model="tiny", input="Rome?", tools=[TOOL])
    call: Any = first.output[0]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        *[item.model_dump(exclude_unset=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"},
    ]
    core.flow.script = saying("Warm.")
    second = await sdk.responses.create(model="tiny", input=items, tools=[TOOL])
    assert second.output_text == "Warm."
    assert '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt_of(core)
    assert "<tool_response>\n21 C" in prompt_of(core)


async def test_a_named_function_is_forced(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying('{"city": "Rome"}')
    choice: Any = {"type": "function", "name": "weather"}
    answer = await sdk.responses.create(model="tiny", input="x", tools=[TOOL], tool_choice=choice)
    assert [item.type for item in answer.output] == ["function_call"]
    assert core.flow.requests[0].sampling.shaping.grammar is not None


async def test_a_pydantic_format_is_a_grammar(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str

    core.flow.script = saying('{"name": "Rome"}')
    answer = await sdk.responses.parse(model="tiny", input="x", text_format=City)
    assert answer.output_parsed == City(name="Rome")
    assert core.flow.requests[0].sampling.shaping.grammar is not None


async def test_a_failure_before_the_first_event_is_a_status_and_after_it_an_event(
    core: FakeCore, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI
) -> None:
    core.flow.script = failing(RequestError(ErrorCode.NO_WORKERS, "nobody"))
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.responses.create(model="tiny", input="x", stream=True)
    assert caught.value.status_code == 503
    core.flow.script = failing(RequestError(ErrorCode.WORKER_LOST, "it is gone"), after="Hello")
    events = [e async for e in await sdk.responses.create(model="tiny", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "it is gone"


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "list"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": IMAGE}, "input[0].content[0]", "image input is not supported yet"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "stores no responses"),
        ({"input": [{"type": "reasoning", "id": "x"}]}, "input[0].type", "not supported yet"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing"),
        ({"input": "x", "store": True}, "store", "stores no responses"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"input": "x", "conversation": "c"}, "conversation", "whole conversation"),
        ({"input": "x", "background": True}, "background", "stores no responses"),
        ({"input": "x", "truncation": "auto"}, "truncation", "no input is cut"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only function"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "context"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.name", "missing"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "must be"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include", "not supported yet"),
        ({"input": "x", "n": 2}, "n", "not supported yet"),
        ({"input": "x", "temperature": 3}, "temperature", "from 0 to 2"),
    ],
)
async def test_what_is_refused_says_why(
    core: FakeCore, http: httpx.AsyncClient, body: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        reply = await http.post(PATH, json={**body, "stream": stream})
        error = error_of(reply)
        assert (reply.status_code, error["param"]) == (400, param)
        assert words in error["message"]
    assert core.flow.requests == []


async def test_store_false_null_fields_and_logprobs_are_taken(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"input": "x", "store": False, "previous_response_id": None, "truncation": "disabled", "wibble": 1}
    body |= {"metadata": {"a": None, "b": "c"}, "tools": [{**TOOL, "output_schema": 5, "defer_loading": "x"}]}
    reply = await http.post(PATH, json=body)
    assert reply.status_code == 200
    assert reply.headers["x-pdray-ignored"] == "wibble"
    assert (await http.post(PATH, json={"input": "x", "model": "other"})).status_code == 404
