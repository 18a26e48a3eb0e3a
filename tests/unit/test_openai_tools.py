"""Tools in chats, by the real client: offered, called, streamed, demanded, answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from services.router.types import TokenEvent
from tests.fronts import (
    EOS_ID,
    FakeCore,
    client_of,
    error_of,
    ids_of,
    make_core,
    prompt_of,
    running,
    saying,
    saying_each,
)

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_call_is_found_and_its_text_is_not_told(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(CALL)
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], max_tokens=200)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert '"name": "weather"' in prompt_of(core)
    assert "<tools>" in prompt_of(core)


@pytest.mark.parametrize("at_once", [1, 4, 100])
async def test_streamed_arguments_join_to_the_whole_ones(core: FakeCore, sdk: openai.AsyncOpenAI, at_once: int) -> None:
    core.flow.script = saying(f"Let me see. {CALL}\n{CALL.replace('Rome', 'Oslo 한')}", at_once=at_once)
    stream = sdk.chat.completions.stream(model="tiny", messages=HI, tools=[WEATHER], max_tokens=300)
    async with stream as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me see. "
    assert [json.loads(c.function.arguments) for c in message.tool_calls or []] == [
        {"city": "Rome"},
        {"city": "Oslo 한"},
    ]
    assert len({c.id for c in message.tool_calls or []}) == 2
    assert final.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2
    if at_once == 1:
        assert kinds.count("tool_calls.function.arguments.delta") > 4


async def test_without_a_call_the_text_is_the_answer(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying("It is <b>warm</b>.")
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER])
    assert answer.choices[0].message.content == "It is <b>warm</b>."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_choice_none_tells_nothing_of_tools_and_finds_no_calls(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(CALL)
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert "weather" not in prompt_of(core)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_is_forced_by_a_grammar(core: FakeCore, sdk: openai.AsyncOpenAI, stream: bool) -> None:
    core.flow.script = saying('[{"name": "weather", "arguments": {"city": "Rome"}}]')
    given: Any = {"model": "tiny", "messages": HI, "tools": [WEATHER], "tool_choice": "required"}
    if stream:
        async with sdk.chat.completions.stream(**given) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        choice = (await sdk.chat.completions.create(**given)).choices[0]
    assert [c.function.name for c in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"
    grammar = core.flow.requests[0].sampling.shaping.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert schema["items"]["properties"]["arguments"] == SCHEMA
    assert schema["minItems"] == 1


async def test_a_named_function_gets_the_whole_answer_as_its_arguments(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying('{"city": "Rome"}')
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = await sdk.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], tool_choice=choice)
    call: Any = (answer.choices[0].message.tool_calls or [])[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    grammar = core.flow.requests[0].sampling.shaping.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == SCHEMA


async def test_one_call_ends_an_answer_that_may_have_only_one(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = saying(CALL + CALL + " and so on")
    body = {"messages": HI, "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 300}
    choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert list(core.flow.ends.values()) == ["closed"]


async def test_a_call_that_is_cut_off_ends_by_its_length(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = saying(CALL)
    cut = len(ids_of(CALL)) - 14
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": cut}
    choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_each_choice_has_calls_of_its_own(core: FakeCore, http: httpx.AsyncClient) -> None:
    core.flow.script = saying_each(CALL, "no call", CALL.replace("Rome", "Oslo"))
    body = {"messages": HI, "tools": [WEATHER], "n": 3, "max_tokens": 200}
    choices = (await http.post(CHAT, json=body)).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[1]["message"]["content"] == "no call"
    assert len({c["message"]["tool_calls"][0]["id"] for c in (choices[0], choices[2])}) == 2


async def test_calls_and_their_results_go_back_into_the_prompt(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    core.flow.script = saying(CALL)
    first = await sdk.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER], max_tokens=200)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "21 C"}
    core.flow.script = saying("It is warm.")
    again: Any = [*HI, message, result]
    second = await sdk.chat.completions.create(model="tiny", messages=again, tools=[WEATHER])
    assert second.choices[0].message.content == "It is warm."
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt_of(core)
    assert "<tool_response>\n21 C\n</tool_response>" in prompt_of(core)


async def test_a_pydantic_function_parses_into_its_own_type(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    class Weather(BaseModel):
        city: str

    core.flow.script = saying(CALL.replace('"weather"', '"Weather"'))
    tool = openai.pydantic_function_tool(Weather)
    answer = await sdk.chat.completions.parse(model="tiny", messages=HI, tools=[tool], max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Rome")


async def test_structured_output_by_a_pydantic_model(core: FakeCore, sdk: openai.AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str
        people: int

    core.flow.script = saying('{"name": "Rome", "people": 3}')
    answer = await sdk.chat.completions.parse(model="tiny", messages=HI, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Rome", people=3)
    assert core.flow.requests[0].sampling.shaping.grammar is not None


async def test_tools_beside_a_format_are_refused(core: FakeCore, http: httpx.AsyncClient) -> None:
    body = {"messages": HI, "tools": [WEATHER], "response_format": {"type": "json_object"}}
    reply = await http.post(CHAT, json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "response_format")
    assert core.flow.requests == []


# --- templates with words of their own for tools ---

QWEN = (
    "{% if tools %}<|im_start|>system\nTOOLS{% for t in tools %} {{ t.function.name }}{% endfor %}"
    " <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, CALL),
        (QWEN.replace("<tool_call></tool_call>", "[TOOL_CALLS]"), '[TOOL_CALLS][{"name": "weather", "arguments": {}}]'),
        (QWEN.replace("<tool_call></tool_call>", '"parameters" ipython'), '{"name": "weather", "parameters": {}}'),
    ],
    ids=["hermes", "mistral", "llama3"],
)
async def test_a_template_that_knows_tools_gets_them_and_tells_the_format(
    tmp_path: Path, template: str, text: str
) -> None:
    core = make_core(tmp_path, chat_template=template)
    core.flow.script = saying(text)
    async with running(core) as fronts, client_of(fronts) as http:
        body = {"messages": HI, "tools": [WEATHER], "max_tokens": 100}
        choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert "TOOLS weather" in prompt_of(core)
    assert "signatures" not in prompt_of(core)


async def test_a_mark_that_is_a_special_token_is_seen_all_the_same(tmp_path: Path) -> None:
    template = QWEN.replace("<tool_call></tool_call>", "[TOOL_CALLS]")
    core = make_core(tmp_path, chat_template=template)
    own = Tokenizer.from_file(str(core.card.tokenizer_path))
    own.add_special_tokens(["[TOOL_CALLS]"])
    own.save(str(core.card.tokenizer_path))
    call = ids_of('[{"name": "weather", "arguments": {"city": "Rome"}}]')

    async def script(_request: Any) -> AsyncIterator[TokenEvent]:
        for token_id in (*ids_of("Sure."), own.token_to_id("[TOOL_CALLS]"), *call):
            yield TokenEvent(token_ids=(token_id,))
        yield TokenEvent(token_ids=(EOS_ID,), finish_reason="stop")

    core.flow.script = script
    async with running(core) as fronts, client_of(fronts) as http:
        body = {"messages": HI, "tools": [WEATHER], "max_tokens": 100}
        message = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert message["content"] == "Sure."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
