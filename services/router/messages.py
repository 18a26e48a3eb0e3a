"""Chat messages in the shapes the OpenAI API allows, brought to the one shape that chat templates read.

Text parts are joined with a line break; a null or empty answer of the assistant is empty text. Images and other media
are refused: they are not there yet.
"""

from __future__ import annotations

import json
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.router.fields import Fields, not_yet, shown
from services.router.template import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256
MEDIA = {
    "image_url": "image input",
    "input_image": "image input",
    "input_audio": "audio input",
    "video_url": "video input",
    "file": "file input",
}


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """The field ``messages``.

    Raises:
        RequestError: 400, ``param`` names the message at fault.
    """
    items = fields.items("messages", max_items=MAX_MESSAGES)
    if items is None:
        raise invalid("messages is missing", "messages")
    if not items:
        raise invalid("messages is empty: give at least one message", "messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(items))


def _message(item: Any, path: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(f"{path} must be an object, got {shown(item)}", path)
    fields = Fields(item, path)
    role = fields.text("role")
    if role not in ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{path}.role")
    message: dict[str, Any] = {"role": role, "content": _content(fields, role)}
    name = fields.text("name", max_chars=MAX_NAME_CHARS)
    if name:
        message["name"] = name
    if role == "assistant":
        calls = _tool_calls(fields)
        if calls:
            message["tool_calls"] = calls
    if role == "tool":
        call_id = fields.text("tool_call_id", max_chars=MAX_NAME_CHARS)
        if not call_id:
            raise invalid(f"{path}.tool_call_id is missing: a tool message answers a tool call", f"{path}.tool_call_id")
        message["tool_call_id"] = call_id
    return message


def _content(fields: Fields, role: str) -> str:
    where, value = fields.name("content"), fields.raw("content")
    if isinstance(value, str):
        return value
    if role == "assistant" and (value is None or value == []):
        return ""
    if value is None:
        raise invalid(f"{where} is missing: a {role} message needs text", where)
    parts = fields.items("content", max_items=MAX_PARTS)
    if not parts:
        raise invalid(f"{where} is an empty list", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object, got {shown(part)}", path)
    fields = Fields(part, path)
    kind = fields.text("type")
    if kind in MEDIA:
        raise not_yet(MEDIA[kind], path)
    if kind not in ("text", "refusal"):
        raise invalid(f"{path}.type must be text, got {shown(kind)}", f"{path}.type")
    text = fields.text(kind)
    if text is None:
        raise invalid(f"{path}.{kind} is missing", f"{path}.{kind}")
    return text


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    calls = fields.items("tool_calls", max_items=MAX_TOOL_CALLS) or []
    return [_tool_call(call, f"{fields.name('tool_calls')}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Templates want the arguments as an object; the API carries them as JSON text."""
    if not isinstance(call, dict):
        raise invalid(f"{path} must be an object, got {shown(call)}", path)
    fields = Fields(call, path)
    kind = fields.text("type") or "function"
    if kind != "function":
        raise invalid(f"{path}.type must be function, got {shown(kind)}", f"{path}.type")
    call_id = fields.text("id", max_chars=MAX_NAME_CHARS)
    function = Fields(fields.object("function") or {}, f"{path}.function")
    name = function.text("name", max_chars=MAX_NAME_CHARS)
    if not call_id or not name:
        raise _incomplete(path, "id" if not call_id else "function.name")
    arguments: Any = function.text("arguments") or "{}"
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _incomplete(path: str, field: str) -> RequestError:
    return invalid(f"{path}.{field} is missing", f"{path}.{field}")
