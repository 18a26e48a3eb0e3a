"""Chat messages: the shapes that are taken, and where the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.router.template import Message
from services.router.validate import chat_ask

USER = [{"role": "user", "content": "hi"}]


def read(messages: Any) -> tuple[Message, ...]:
    return chat_ask({"messages": messages}, "tiny", 500).messages


def refusal(messages: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(messages)
    return caught.value


CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]


@pytest.mark.parametrize(
    ("messages", "contents"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], ["a", "b"]),
        ([{"role": "system", "content": "s"}], ["s"]),
        ([{"role": "developer", "content": "d"}], ["d"]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], ["a\nb"]),
        ([{"role": "assistant", "content": None, "tool_calls": CALLS}], [""]),
        ([{"role": "assistant", "tool_calls": CALLS}], [""]),
        ([{"role": "assistant", "content": "", "tool_calls": CALLS}], [""]),
        ([{"role": "assistant", "content": [], "tool_calls": CALLS}], [""]),
        ([{"role": "assistant", "content": None}], [""]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], ["no"]),
        ([{"role": "tool", "content": "42", "tool_call_id": "c1"}], ["42"]),
        ([{"role": "user", "content": "", "name": "ann"}], [""]),
    ],
)
def test_legal_messages_reach_the_template(messages: Any, contents: list[str]) -> None:
    taken = read(messages)
    assert [m["content"] for m in taken] == contents
    assert all(value is not None for m in taken for value in m.values())


def test_arguments_of_a_tool_call_are_an_object_for_the_template() -> None:
    taken = read([{"role": "assistant", "tool_calls": CALLS}])
    assert taken[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([*USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "smell", "text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "42"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_illegal_messages_are_refused_with_their_place(messages: Any, param: str) -> None:
    error = refusal(messages)
    assert (error.status.http, error.param) == (400, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_are_not_there_yet(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:,"}}]}]
    error = refusal(messages)
    assert (error.code, error.param) == (ErrorCode.NOT_YET_SUPPORTED, "messages[0].content[1]")
    assert "input" in error.message
