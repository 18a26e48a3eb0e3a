"""The reader of answers itself finds what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tests.strict import check_document, check_stream

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "x", "refusal": None}, "finish_reason": "stop"}
    ],
}


def test_a_right_answer_passes() -> None:
    check_document(CHAT)
    check_document({**CHAT, "prompt_token_ids": [1]})
    check_stream("/v1/chat/completions", ": ping\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {**CHAT, "created": "1"},
        {**CHAT, "extra": 1},
        {**CHAT, "choices": [{**CHAT["choices"][0], "finish_reason": "error"}]},
        {**CHAT, "choices": [{**CHAT["choices"][0], "why": 1}]},
        {**CHAT, "object": "chat"},
        {"error": {"message": "x"}},
    ],
)
def test_a_wrong_one_does_not(wrong: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError, ValidationError)):
        check_document(wrong)
    with pytest.raises((AssertionError, KeyError, ValidationError)):
        check_stream("/v1/chat/completions", f"data: {json.dumps(wrong)}\n\n")
