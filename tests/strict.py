"""Every answer of the HTTP app, read strictly as the `openai` and `anthropic` packages type it.

Types of values must be exact (no text for a number), fields that no type knows must be ones we document, and a stream
must be framed as its API says. `StrictAnswers` checks all that passes through it, whichever client asked.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic.types as claude
import openai.types as oai
from openai.types import responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

EXTRAS = {"max_model_len", "token_ids", "prompt_token_ids", "prompt_logprobs"}
"""Fields of ours, and of vLLM's, that docs/http-api.md lists."""
OPENAI_TYPES: dict[str, Any] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": oai.Completion,
    "model": oai.Model,
    "response": responses.Response,
}
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses", "/v1/embeddings")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def strictly(kind: Any, data: dict[str, Any]) -> None:
    """Raise unless the document is exactly of this type."""
    parsed = _adapter(kind).validate_json(json.dumps(data), strict=True)
    unknown = set(_unknown(parsed)) - EXTRAS
    assert not unknown, f"fields that {kind} does not know: {sorted(unknown)} in {data}"


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            if not (isinstance(value, responses.Response) and name in ("metadata", "tools")):
                yield from _unknown(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _unknown(item)


def check_document(data: dict[str, Any]) -> None:
    """One whole answer, or one event of a chat or completion."""
    if "error" in data and data.get("object") is None and data.get("type") is None:
        assert set(data) == {"error"}
        assert set(data["error"]) == {"message", "type", "param", "code"}
        return
    if data.get("type") == "error":
        strictly(claude.ErrorResponse, data)
        return
    if data.get("object") == "list" and "usage" in data:
        strictly(oai.CreateEmbeddingResponse, _decoded(data))
        return
    if data.get("object") == "list":
        for item in data["data"]:
            check_document(item)
        return
    if data.get("type") == "message":
        strictly(claude.Message, data)
        return
    strictly(OPENAI_TYPES[data["object"]], _nulls_filled(data))


def _decoded(data: dict[str, Any]) -> dict[str, Any]:
    """The package types a vector as numbers, and makes them of base64 itself."""
    entries = []
    for item in data["data"]:
        vector = item["embedding"]
        if isinstance(vector, str):
            raw = base64.b64decode(vector, validate=True)
            vector = [x for (x,) in struct.iter_unpack("<f", raw)]
        entries.append({**item, "embedding": vector})
    return {**data, "data": entries}


def _nulls_filled(data: dict[str, Any]) -> dict[str, Any]:
    """The package types a completion's chunks as whole answers; what only these have is null before, as OpenAI does."""
    if data["object"] != "text_completion":
        return data
    filled = json.loads(json.dumps(data))
    for choice in filled["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for key in ("token_logprobs", "top_logprobs"):
            told = (choice.get("logprobs") or {}).get(key)
            if told and told[0] is None:
                told.pop(0)
    return dict(filled)


def check_stream(path: str, body: str) -> None:
    """The whole events of a stream, which may have been cut off by its client."""
    blocks = body.split("\n\n")[:-1]
    for i, block in enumerate(b for b in blocks if not b.startswith(":")):
        lines = block.split("\n")
        if path == "/v1/responses":
            _check_response_event(lines, i)
        elif path == "/v1/messages":
            _check_message_event(lines)
        else:
            assert len(lines) == 1, block
            data = lines[0].removeprefix("data: ")
            if data != "[DONE]":
                check_document(json.loads(data))


def _named(lines: list[str]) -> dict[str, Any]:
    name, data = lines
    event: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    return event


def _check_response_event(lines: list[str], position: int) -> None:
    event = _named(lines)
    assert event["sequence_number"] == position
    strictly(responses.ResponseStreamEvent, event)


def _check_message_event(lines: list[str]) -> None:
    event = _named(lines)
    if event["type"] == "ping":
        assert event == {"type": "ping"}
    elif event["type"] == "error":
        strictly(claude.ErrorResponse, event)
    else:
        strictly(claude.RawMessageStreamEvent, event)


class StrictAnswers:
    """ASGI middleware that keeps what is wrong with the answers in ``found``."""

    def __init__(self, app: ASGIApp, found: list[str]) -> None:
        self._app = app
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind, body = "", bytearray()

        async def watched(message: Message) -> None:
            nonlocal kind
            if message["type"] == "http.response.start":
                kind = dict(message.get("headers", [])).get(b"content-type", b"").decode()
            else:
                body.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if scope["type"] == "http":
                self._check(scope["path"], kind, bytes(body))

    def _check(self, path: str, kind: str, body: bytes) -> None:
        try:
            if kind.startswith("text/event-stream"):
                check_stream(path, body.decode(errors="ignore"))
            elif kind.startswith("application/json") and (path.startswith(OPENAI_PATHS) or path == "/v1/messages"):
                check_document(json.loads(body))
        except Exception as exc:  # told at the end, by the one who runs the app
            self._found.append(f"{path}: {type(exc).__name__}: {exc}\n{body[:2000]!r}")
