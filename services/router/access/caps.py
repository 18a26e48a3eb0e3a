"""How much one request may hold, looked at before its fields are: one function for every front and endpoint.

Only counts and sizes are judged here; a value of a wrong type is the fields' own business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.access_config import LimitsConfig
from services.protocol.errors import invalid

_SCHEMA_KEYS = ("json", "regex", "grammar", "choice")


def check_limits(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Refuse a body that holds more than ``limits`` allow.

    Raises:
        RequestError: INVALID_REQUEST with the count, the limit and the setting; ``param`` names the field.
    """
    for field, count, name, what in _counts(body):
        limit = getattr(limits, name)
        if count > limit:
            raise invalid(f"{field} has {count} {what}, at most {limit} are allowed (limits.{name})", field)
    for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = body.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > limits.logprobs:
            raise invalid(f"{field} is {value}, at most {limits.logprobs} are allowed (limits.logprobs)", field)
    for field in ("stop", "stop_sequences"):
        for text in _listed(body.get(field)):
            if isinstance(text, str) and len(text) > limits.stop_chars:
                message = f"a stop text has {len(text)} characters, at most {limits.stop_chars} are allowed"
                raise invalid(f"{message} (limits.stop_chars)", field)
    for field, schema in _schemas(body):
        _check_schema(field, schema, limits)


def _counts(body: Mapping[str, Any]) -> Iterator[tuple[str, int, str, str]]:
    """(field, how many, setting, of what)."""
    for field in ("input", "text_1", "text_2"):
        items = _list(body.get(field))
        if items and isinstance(items[0], str | list):
            yield field, len(items), "texts", "texts"
    for field in ("messages", "input"):
        items = _list(body.get(field))
        if items and field == "input" and not isinstance(items[0], dict):
            continue  # texts or token ids to embed
        yield field, len(items), "messages", "messages"
        for i, item in enumerate(items):
            message = _map(item)
            yield f"{field}[{i}].content", len(_list(message.get("content"))), "parts", "parts"
            yield f"{field}[{i}].tool_calls", len(_list(message.get("tool_calls"))), "tools", "tool calls"
    yield "system", len(_list(body.get("system"))), "parts", "parts"
    prompts = _list(body.get("prompt"))
    if prompts and isinstance(prompts[0], str | list):
        yield "prompt", len(prompts), "prompts", "prompts"
    for field in ("stop", "stop_sequences"):
        yield field, len(_list(body.get(field))), "stops", "stop texts"
    yield "stop_token_ids", len(_list(body.get("stop_token_ids"))), "stop_token_ids", "token ids"
    yield "logit_bias", len(_map(body.get("logit_bias"))), "bias_entries", "entries"
    for field in ("tools", "functions"):
        yield field, len(_list(body.get(field))), "tools", "tools"
    yield "chat_template_kwargs", len(_map(body.get("chat_template_kwargs"))), "template_kwargs", "entries"
    yield "metadata", len(_map(body.get("metadata"))), "metadata_entries", "entries"


def _schemas(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    wrapped = _map(_map(body.get("response_format")).get("json_schema"))
    yield "response_format", wrapped.get("schema")
    yield "text", _map(_map(body.get("text")).get("format")).get("schema")
    options = _map(body.get("structured_outputs"))
    for key in _SCHEMA_KEYS:
        yield f"structured_outputs.{key}", options.get(key)
        yield f"guided_{key}", body.get(f"guided_{key}")
    for field in ("tools", "functions"):
        for i, tool in enumerate(_list(body.get(field))):
            given = _map(tool)
            function = _map(given.get("function")) or given
            for key in ("parameters", "input_schema"):
                yield f"{field}[{i}]", function.get(key)


def _check_schema(field: str, schema: Any, limits: LimitsConfig) -> None:
    size, depth = _extent(schema, limits.schema_bytes, limits.schema_depth)
    if size > limits.schema_bytes:
        message = f"{field} has a schema of more than {limits.schema_bytes} bytes"
        raise invalid(f"{message}, which is the limit (limits.schema_bytes)", field)
    if depth > limits.schema_depth:
        message = f"{field} has a schema that nests deeper than {limits.schema_depth} levels"
        raise invalid(f"{message}, which is the limit (limits.schema_depth)", field)


def _extent(value: Any, max_size: int, max_depth: int) -> tuple[int, int]:
    """About the length as JSON, and the depth; stops where either passes its limit. JSON in a text is looked into."""
    size, depth = 0, 0
    if isinstance(value, str):
        size = len(value)
        if size > max_size or not value.lstrip().startswith(("{", "[")):
            return size, 0
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return size, 0
        size = 0
    level: list[Any] = [value]
    while level:
        below: list[Any] = []
        for node in level:
            size += _own_size(node)
            below.extend(_children(node))
            if size > max_size:
                return size, depth
        depth += any(isinstance(node, dict | list) for node in level)
        if depth > max_depth:
            return size, depth
        level = below
    return size, depth


def _own_size(node: Any) -> int:
    if isinstance(node, str):
        return len(node) + 3
    if isinstance(node, dict):
        return 2 + sum(len(str(key)) + 4 for key in node)
    return 2 if isinstance(node, list) else 5


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else _list(value)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
