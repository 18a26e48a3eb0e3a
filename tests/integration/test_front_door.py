"""The front door before a real model, prefill and decode apart: demanded calls, responses, messages by real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.integration.rig import Cluster

ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}


@pytest.fixture(scope="module")
def client(pd_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pd_cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_demanded_call_has_a_name_and_arguments_of_the_schema(client: openai.OpenAI, model: str, choice: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    given: Any = {"model": model, "messages": ASKED, "tools": [tool], "max_tokens": 60, "temperature": 0}
    given["tool_choice"] = {"type": "function", "function": {"name": "weather"}} if choice == "named" else choice
    given["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**given).choices[0]
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    for got in (whole, streamed):
        assert got.finish_reason == "tool_calls"
        (call,) = got.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
    first, second = (x.message.tool_calls[0].function for x in (whole, streamed) if x.message.tool_calls)
    assert first.model_dump(include={"arguments"}) == second.model_dump(include={"arguments"})


def test_a_response_parses_into_a_pydantic_model(client: openai.OpenAI, model: str) -> None:
    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        warm: bool

    answer = client.responses.parse(model=model, input=ASKED, text_format=Weather, max_output_tokens=40)
    assert isinstance(answer.output_parsed, Weather)
    events = list(client.responses.create(model=model, input="Hi", max_output_tokens=8, temperature=0, stream=True))
    whole = client.responses.create(model=model, input="Hi", max_output_tokens=8, temperature=0)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


def test_the_anthropic_client_streams_the_same_message(pd_cluster: Cluster, model: str) -> None:
    given: Any = {"model": model, "max_tokens": 8, "messages": ASKED, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=pd_cluster.url, api_key="none", max_retries=0) as claude:
        whole = claude.messages.create(**given)
        with claude.messages.stream(**given) as stream:
            text = "".join(stream.text_stream)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == text
    assert whole.usage.output_tokens == 8
