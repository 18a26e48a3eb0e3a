"""The body of /v1/messages, Anthropic's form of a chat, as an `Ask`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.router.api.responses_ask import required
from services.router.extras import MAX_LABEL_CHARS, Extras
from services.router.fields import Fields, not_yet, shown
from services.router.messages import MAX_MESSAGES, MAX_PARTS
from services.router.shaping import read_shaping
from services.router.template import Message
from services.router.tools.spec import AUTO, NAMED, NONE, REQUIRED, Tools, make_tools, objects, read_function
from services.router.validate import ANY_COUNT, Ask, check_model, read_common, with_tools

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": NAMED}
_MEDIA = {"image": "image input", "document": "document input"}
_WITHOUT_EFFECT = ("cache_control", "service_tier", "inference_geo", "context_management", "output_config", "speed")
_NOT_READ = ("messages", "tools", "tool_choice", "system", "metadata", "max_tokens", "stop_sequences", "stream_options")


def message_ask(body: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """Check the body.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields, counting = Fields(body), tokens_ask_part(Fields(body), model)
    limit = fields.integer("max_tokens", 1, ANY_COUNT)
    if limit is None:
        raise invalid("max_tokens is missing: this API wants it", "max_tokens")
    inner = Fields({k: v for k, v in body.items() if k not in _NOT_READ} | {"stop": body.get("stop_sequences")})
    inner.raw("model")
    try:
        common = read_common(inner, vocab_size, echo=False)
    except RequestError as exc:
        exc.message = exc.message.replace("stop ", "stop_sequences ")
        exc.param = "stop_sequences" if exc.param == "stop" else exc.param
        raise
    inner.only("n", (1,), "several choices (n) of a message")
    inner.only("thinking", ({"type": "disabled"},), "thinking")
    inner.only("mcp_servers", ([],), "a server of tools")
    inner.only("container", (), "a container")
    _check_metadata(fields)
    shaping = with_tools(read_shaping(inner, vocab_size, is_chat=True), counting.tools)
    for key in _WITHOUT_EFFECT:
        inner.raw(key)
    common |= {"max_tokens": limit, "max_tokens_field": "max_tokens"}
    return Ask(
        messages=counting.messages,
        tools=counting.tools,
        shaping=shaping,
        extras=Extras(add_generation_prompt=True),
        ignored=inner.unread(),
        **common,
    )


def tokens_ask_part(fields: Fields, model: str) -> Ask:
    """What /v1/messages/count_tokens needs: messages and tools. Raises RequestError."""
    check_model(fields, model)
    return Ask(messages=_messages(fields), tools=_tools(fields))


def _check_metadata(fields: Fields) -> None:
    metadata = Fields(fields.object("metadata") or {}, "metadata")
    metadata.text("user_id", max_chars=MAX_LABEL_CHARS)


# --- messages ---


def _messages(fields: Fields) -> tuple[Message, ...]:
    found: list[dict[str, Any]] = []
    if fields.raw("system") is not None:
        found.append({"role": "system", "content": _text_of(fields, "system")})
    items = fields.items("messages", max_items=MAX_MESSAGES)
    if items is None:
        raise invalid("messages is missing", "messages")
    if not items:
        raise invalid("messages is empty: give at least one message", "messages")
    for i, item in enumerate(items):
        path = f"messages[{i}]"
        if not isinstance(item, dict):
            raise invalid(f"{path} must be an object, got {shown(item)}", path)
        found += _message(Fields(item, path))
    if found[-1]["role"] == "assistant":
        raise not_yet("going on with a message of the assistant", f"messages[{len(items) - 1}]")
    return tuple(found)


def _message(item: Fields) -> list[dict[str, Any]]:
    role = item.text("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{item.name('role')} must be user, assistant or system, got {shown(role)}", item.name("role"))
    if isinstance(item.raw("content"), str):
        return [{"role": role, "content": item.raw("content")}]
    blocks = _blocks(item, "content")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            content = "" if block.raw("content") is None else _text_of(block, "content")
            results.append({"role": "tool", "tool_call_id": required(block, "tool_use_id"), "content": content})
        else:
            texts.append(_text(block, kind))
    if role == "assistant":
        return [{"role": role, "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}]
    said = [{"role": role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _blocks(item: Fields, key: str) -> list[Fields]:
    blocks = item.items(key, max_items=MAX_PARTS)
    where = item.name(key)
    if blocks is None:
        raise invalid(f"{where} is missing", where)
    found = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise invalid(f"{where}[{i}] must be an object, got {shown(block)}", f"{where}[{i}]")
        found.append(Fields(block, f"{where}[{i}]"))
    return found


def _text_of(item: Fields, key: str) -> str:
    """Text, or blocks of text."""
    value = item.raw(key)
    if isinstance(value, str):
        return value
    return "\n".join(_text(block, block.text("type")) for block in _blocks(item, key))


def _text(block: Fields, kind: str | None) -> str:
    if kind in _MEDIA:
        raise not_yet(_MEDIA[kind], block.name("type"))
    if kind != "text":
        raise not_yet(f"a block of type {shown(kind)} here", block.name("type"))
    text = block.text("text")
    if text is None:
        raise invalid(f"{block.name('text')} is missing", block.name("text"))
    return text


def _call(block: Fields) -> dict[str, Any]:
    arguments = block.object("input") or {}
    function = {"name": required(block, "name"), "arguments": arguments}
    return {"id": required(block, "id"), "type": "function", "function": function}


def _tools(fields: Fields) -> Tools:
    functions = []
    for tool in objects(fields, "tools"):
        if tool.text("type") not in (None, "custom"):
            raise not_yet(f"a tool of type {shown(tool.text('type'))}", tool.name("type"))
        functions.append(read_function(tool, "input_schema"))
    choice = Fields(fields.object("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = choice.text("type")
    if kind not in _CHOICES:
        raise invalid(f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}", "tool_choice.type")
    named = required(choice, "name") if kind == "tool" else ""
    is_parallel = choice.flag("disable_parallel_tool_use") is not True
    return make_tools(tuple(functions), _CHOICES[kind], named, is_parallel=is_parallel)
