"""The body of /v1/responses as an `Ask`. Nothing is stored, so all that needs a stored response is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.router.extras import read_extras
from services.router.fields import Fields, not_yet, shown
from services.router.messages import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PARTS, MEDIA
from services.router.shaping import read_shaping
from services.router.template import Message
from services.router.tools.spec import (
    AUTO,
    NAMED,
    NONE,
    REQUIRED,
    Function,
    Tools,
    check_kind,
    make_tools,
    objects,
    read_function,
)
from services.router.validate import ANY_COUNT, Ask, check_model, read_common, with_tools

ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")
_NOT_STORED = "this server stores no responses: send the whole conversation as input"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "this server stores no responses; send store: false"),
    "previous_response_id": ((), _NOT_STORED),
    "conversation": ((), _NOT_STORED),
    "background": ((False,), "this server stores no responses, so none can be fetched later"),
    "prompt": ((), "this server keeps no prompt templates"),
    "truncation": (("disabled",), "no input is cut here; send one that fits"),
}
_WITHOUT_EFFECT = ("max_tool_calls", "client_metadata")


@dataclass(frozen=True, slots=True)
class ResponseAsk:
    """A checked request, and what its answer repeats of it."""

    ask: Ask
    instructions: str | None
    form: Mapping[str, Any]  # text.format
    tool_choice: Any
    labels: Mapping[str, Any]  # metadata, user and the like


def response_ask(body: Mapping[str, Any], model: str, vocab_size: int) -> ResponseAsk:
    """Check the body.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields = Fields(body)
    for key, (neutral, why) in _REFUSED.items():
        fields.never(key, neutral, why)
    form, as_chat = _as_chat(fields)
    inner = Fields({**body, **as_chat})
    check_model(inner, model)
    try:
        common = read_common(inner, vocab_size, echo=False)
        inner.only("n", (1,), "several choices (n) of a response")
        shaping = read_shaping(inner, vocab_size, is_chat=True)
    except RequestError as exc:
        raise _in_own_words(exc) from None
    limit = fields.integer("max_output_tokens", 1, ANY_COUNT)
    if limit is not None:
        common |= {"max_tokens": limit, "max_tokens_field": "max_output_tokens"}
    tools = _tools(fields)
    instructions = fields.text("instructions")
    messages = _messages(fields, instructions)
    ask = Ask(
        messages=messages,
        shaping=with_tools(shaping, tools),
        tools=tools,
        extras=read_extras(inner, is_chat=True),
        ignored=_ignored(fields, inner),
        **common,
    )
    return ResponseAsk(ask, instructions, form, _choice_told(tools), _labels(body))


def _choice_told(tools: Tools) -> Any:
    if tools.choice == NAMED:
        return {"type": "function", "name": tools.named}
    return tools.choice if tools.functions else AUTO


def _labels(body: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: body[key] for key in ("user", "prompt_cache_key", "safety_identifier") if body.get(key)}
    return {**found, "metadata": {k: v for k, v in (body.get("metadata") or {}).items() if v is not None}}


def _ignored(fields: Fields, inner: Fields) -> tuple[str, ...]:
    for key in _WITHOUT_EFFECT:
        fields.raw(key)
    read_by_one = set(fields.unread()) & set(inner.unread())
    return tuple(key for key in fields.unread() if key in read_by_one)


def _as_chat(fields: Fields) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """What a chat calls otherwise, in its words: format, logprobs, effort."""
    found: dict[str, Any] = {}
    text = Fields(fields.object("text") or {}, "text")
    form = text.object("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        inner = Fields(form, "text.format")
        required(inner, "name")
        if inner.object("schema") is None:
            raise invalid("text.format.schema is missing", "text.format.schema")
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": {k: v for k, v in form.items() if k != "type"},
        }
    else:
        found["response_format"] = form
    reasoning = Fields(fields.object("reasoning") or {}, "reasoning")
    found["reasoning_effort"] = reasoning.text("effort")
    found["verbosity"] = text.text("verbosity")
    wanted = fields.items("include", max_items=16) or []
    for item in wanted:
        if item not in (LOGPROBS, "reasoning.encrypted_content"):
            raise not_yet(f"{shown(item)} in include (only {LOGPROBS})", "include")
    found["logprobs"] = LOGPROBS in wanted or bool(fields.integer("top_logprobs", 0, 20))
    return form, found


def _in_own_words(error: RequestError) -> RequestError:
    for chat, own in (("response_format.json_schema", "text.format"), ("response_format", "text.format")):
        error.message = error.message.replace(chat, own)
        error.param = error.param and error.param.replace(chat, own)
    return error


# --- input ---


def _messages(fields: Fields, instructions: str | None) -> tuple[Message, ...]:
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    value = fields.raw("input")
    if isinstance(value, str):
        return (*found, {"role": "user", "content": value})
    items = fields.items("input", max_items=MAX_MESSAGES)
    if items is None:
        raise invalid("input is missing", "input")
    if not items:
        raise invalid("input is empty: give at least one message", "input")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"input[{i}] must be an object, got {shown(item)}", f"input[{i}]")
        _add_item(found, Fields(item, f"input[{i}]"))
    return tuple(found)


def _add_item(found: list[dict[str, Any]], item: Fields) -> None:
    kind = item.text("type") or "message"
    if kind == "message":
        role = item.text("role")
        if role not in ROLES:
            raise invalid(
                f"{item.name('role')} must be one of {', '.join(ROLES)}, got {shown(role)}", item.name("role")
            )
        found.append({"role": role, "content": read_content(item, "content")})
    elif kind == "function_call":
        call = _call(item)
        if found and found[-1].get("role") == "assistant":  # its text, or a call beside this one
            found[-1].setdefault("tool_calls", []).append(call)
        else:
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        call_id = required(item, "call_id")
        found.append({"role": "tool", "tool_call_id": call_id, "content": read_content(item, "output")})
    elif kind == "item_reference":
        raise invalid(f"{item.name('type')}: {_NOT_STORED}", item.name("type"))
    else:
        raise not_yet(f"an input of type {shown(kind)}", item.name("type"))


def required(item: Fields, key: str) -> str:
    """A name that must be there. Raises RequestError."""
    text = item.text(key, max_chars=MAX_NAME_CHARS)
    if not text:
        raise invalid(f"{item.name(key)} is missing", item.name(key))
    return text


def _call(item: Fields) -> dict[str, Any]:
    call_id, name = required(item, "call_id"), required(item, "name")
    arguments: Any = item.text("arguments") or "{}"
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": name, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_content(item: Fields, key: str) -> str:
    """Text, or parts of text joined with line breaks. Raises RequestError for other media."""
    where, value = item.name(key), item.raw(key)
    if isinstance(value, str):
        return value
    parts = item.items(key, max_items=MAX_PARTS)
    if parts is None:
        raise invalid(f"{where} is missing", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object, got {shown(part)}", path)
    fields = Fields(part, path)
    kind = fields.text("type")
    if kind in MEDIA or kind == "input_file":
        raise not_yet(MEDIA.get(kind, "file input"), path)
    if kind == "refusal":
        return fields.text("refusal") or ""
    if kind not in _TEXT_PARTS:
        raise invalid(f"{path}.type must be input_text, output_text or refusal, got {shown(kind)}", f"{path}.type")
    text = fields.text("text")
    if text is None:
        raise invalid(f"{path}.text is missing", f"{path}.text")
    return text


# --- tools ---


def _tools(fields: Fields) -> Tools:
    functions: list[Function] = []
    for tool in objects(fields, "tools"):
        check_kind(tool)
        functions.append(read_function(tool, "parameters"))
    choice, named = _choice(fields)
    return make_tools(tuple(functions), choice, named, is_parallel=fields.flag("parallel_tool_calls") is not False)


def _choice(fields: Fields) -> tuple[str, str]:
    value = fields.raw("tool_choice")
    if value is None or value in (AUTO, NONE, REQUIRED):
        return value or AUTO, ""
    if not isinstance(value, dict):
        raise invalid(f"tool_choice must be none, auto, required or a function, got {shown(value)}", "tool_choice")
    inner = Fields(value, "tool_choice")
    check_kind(inner)
    return NAMED, required(inner, "name")
