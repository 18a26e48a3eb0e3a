"""Calls in what models write: every format, however the text is cut, and what is no call stays text."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.router.fields import Fields
from services.router.tools.parsers import HERMES, LLAMA3_JSON, MISTRAL, make_parser
from services.router.tools.spec import Function, Tools, forced_grammar, read_tools

OFFERED = (Function(name="add"), Function(name="get_weather"))
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}]"]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2, "}]"]}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "S\\u00e3o \\"P\\""}}'
WEATHER_ARGUMENTS = '{"city": "S\\u00e3o \\"P\\""}'


def tools(choice: str = "auto", *, is_parallel: bool = True) -> Tools:
    named = "add" if choice == "named" else ""
    return Tools(functions=OFFERED, choice=choice, named=named, is_parallel=is_parallel)


def parse(text: str, cuts: list[int], asked: Tools, form: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls, as a client puts the deltas together."""
    parser, said, calls = make_parser(asked, form), "", []
    edges = [0, *cuts, len(text)]
    pieces = [parser.push(text[a:b]) for a, b in pairwise(edges)]
    for piece in [*pieces, parser.flush()]:
        said += piece.text
        assert len({call.index for call in piece.calls}) == len(piece.calls)
        for call in piece.calls:
            assert call.index == len(calls) - (not call.id)
            if call.id:
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert parser.has_called == bool(calls)
    return said, calls


def however_cut(text: str, asked: Tools, form: str) -> tuple[str, list[tuple[str, str]]]:
    """The result, which must not depend on how the text comes."""
    whole = parse(text, [], asked, form)
    assert parse(text, list(range(1, len(text))), asked, form) == whole
    rng = random.Random(7)
    for _ in range(30):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 6))))
        assert parse(text, cuts, asked, form) == whole, cuts
    return whole


TWO = [("add", ADD_ARGUMENTS), ("get_weather", WEATHER_ARGUMENTS)]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", TWO[:1]),
        (f"\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n", "", TWO),
        (f"Let me see. <tool_call>{ADD}</tool_call>", "Let me see. ", TWO[:1]),
        (f"<tool_call>{ADD}</tool_call> and more", "\x20and more", TWO[:1]),
        (f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", TWO),
        ("<tool_call>\n" + ADD, "", TWO[:1]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "add", "arguments": {}}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ],
)
def test_hermes_calls_are_found_however_the_text_is_cut(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert however_cut(text, tools(), HERMES) == (said, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n plain text < with <tool_cal and so on\n\n",
        "<tool_call>nothing</tool_call> x",
        '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>',
        '<tool_call>{"wrong": 1}</tool_call> after',
        '<tool_call>{"na',
        "<tool_call>",
        "a <tool_call> b",
        '{"name": "add", "arguments": {}}',
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    assert however_cut(text, tools(), HERMES) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (LLAMA3_JSON, ADD.replace("arguments", "parameters"), "", TWO[:1]),
        (LLAMA3_JSON, f"{ADD}; {WEATHER}", "", TWO),
        (LLAMA3_JSON, f"  {ADD}\n{WEATHER}", "", TWO),
        (LLAMA3_JSON, '{"a": 1}', '{"a": 1}', []),
        (LLAMA3_JSON, '{"name": "Bob", "age": 4}', '{"name": "Bob", "age": 4}', []),
        (LLAMA3_JSON, f"I would use {ADD}", f"I would use {ADD}", []),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}, {WEATHER}]", "", TWO),
        (MISTRAL, f"Sure.[TOOL_CALLS][{ADD}]", "Sure.", TWO[:1]),
        (MISTRAL, f"[TOOL_CALLS]add{ADD_ARGUMENTS}", "", TWO[:1]),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ADD_ARGUMENTS}[TOOL_CALLS]get_weather[ARGS]{WEATHER_ARGUMENTS}", "", TWO),
        (MISTRAL, "no call [TOOL", "no call [TOOL", []),
    ],
)
def test_other_formats(form: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert however_cut(text, tools(), form) == (said, calls)


def test_a_demanded_answer_is_a_list_of_calls_whatever_the_format() -> None:
    for form in (HERMES, LLAMA3_JSON, MISTRAL):
        assert however_cut(f"[{ADD}, {WEATHER}]", tools("required"), form) == ("", TWO)
        assert however_cut('{"a": [1]}', tools("named"), form) == ("", [("add", '{"a": [1]}')])


def test_one_call_is_enough_where_calls_are_not_parallel() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call> bye"
    assert however_cut(text, tools(is_parallel=False), HERMES) == ("", TWO[:1])
    parser = make_parser(tools(is_parallel=False), HERMES)
    parser.push(f"<tool_call>{ADD}")
    assert parser.is_over


def test_ids_are_unique_and_fit_mistrals_templates() -> None:
    texts = {HERMES: f"<tool_call>{ADD}</tool_call>", MISTRAL: f"[TOOL_CALLS][{ADD}]"}
    ids = {form: [make_parser(tools(), form).push(text).calls[0].id for _ in range(20)] for form, text in texts.items()}
    assert all(len(set(found)) == 20 for found in ids.values())
    assert all(len(i) == 9 and i.isalnum() for i in ids[MISTRAL])
    assert all(i.startswith("call_") for i in ids[HERMES])


# --- what a request says ---

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def chat_tool(name: str = "f", **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **more}}


def read(body: dict[str, object]) -> Tools:
    return read_tools(Fields(body))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tools": "x"}, "tools", ErrorCode.INVALID_REQUEST),
        ({"tools": [1]}, "tools[0]", ErrorCode.INVALID_REQUEST),
        ({"tools": [{}]}, "tools[0].type", ErrorCode.INVALID_REQUEST),
        ({"tools": [{"type": "function"}]}, "tools[0].function", ErrorCode.INVALID_REQUEST),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", ErrorCode.NOT_YET_SUPPORTED),
        ({"tools": [chat_tool("a b")]}, "tools[0].function.name", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool(parameters=[])]}, "tools[0].function.parameters", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "invalid_request"),
        ({"tools": [chat_tool(), chat_tool()]}, "tools[1]", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool()], "tool_choice": "some"}, "tool_choice", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool()], "tool_choice": 1}, "tool_choice", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "not_yet_supported"),
        ({"tools": [chat_tool()], "tool_choice": chat_tool("g")}, "tool_choice", ErrorCode.INVALID_REQUEST),
        ({"tool_choice": "required"}, "tool_choice", ErrorCode.INVALID_REQUEST),
        ({"tools": [], "tool_choice": chat_tool("g")}, "tool_choice", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool()], "parallel_tool_calls": 1}, "parallel_tool_calls", ErrorCode.INVALID_REQUEST),
        ({"tools": [chat_tool(f"f{i}") for i in range(129)]}, "tools", ErrorCode.INVALID_REQUEST),
    ],
)
def test_wrong_tools_are_refused_where_they_are_wrong(body: dict[str, object], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(body)
    assert (caught.value.param, str(caught.value.code)) == (param, str(code))


def test_no_tools_may_come_with_a_choice_that_demands_nothing() -> None:
    for body in ({}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert read(body).offered == ()
    assert read({"tools": [chat_tool()], "tool_choice": "none"}).offered == ()


def test_a_demanded_call_is_a_schema_that_keeps_each_functions_own_definitions() -> None:
    asked = read({"tools": [chat_tool("f", parameters=SCHEMA), chat_tool("g", parameters=SCHEMA)]})
    asked = Tools(functions=asked.functions, choice="required")
    schema = json.loads(forced_grammar(asked).text)
    assert schema["$defs"] == {"t0.n": {"type": "integer"}, "t1.n": {"type": "integer"}}
    first = schema["items"]["anyOf"][0]["properties"]
    assert first["name"] == {"const": "f"}
    assert first["arguments"]["properties"]["a"] == {"$ref": "#/$defs/t0.n"}
    one = Tools(functions=asked.functions, choice="named", named="g")
    assert json.loads(forced_grammar(one).text) == SCHEMA


def test_a_schema_that_refers_to_itself_or_to_nothing() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}}
    asked = Tools(functions=(Function(name="f", parameters=tree),), choice="required")
    schema = json.loads(forced_grammar(asked).text)
    assert schema["$defs"]["t0"]["properties"]["left"] == {"$ref": "#/$defs/t0"}
    bad = Tools(functions=(Function(name="f", parameters={"$ref": "http://x/y"}),), choice="required")
    with pytest.raises(RequestError, match="refers to"):
        forced_grammar(bad)
