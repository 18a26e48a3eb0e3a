"""The functions that a request offers, which of them must be called, and the grammar that demands it.

`required` and a named function are forced by a grammar, so the arguments always follow their schema; under `auto` the
model writes as it likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import invalid
from services.protocol.grammar import GrammarSpec
from services.router.fields import Fields, not_yet, shown

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 16 << 10
MAX_FORCED_CALLS = 16
"""Calls of one forced answer; a grammar without an end invites a small model to go on for ever."""
AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ANY: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # JSON schema of an object; None: any object
    strict: bool | None = None  # as the client gave it

    def as_tool(self) -> dict[str, Any]:
        """The shape of the chat API, which is what chat templates read."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request says about tools. ``choice``: auto, none, required or named, which means ``named``."""

    functions: tuple[Function, ...]
    choice: str = AUTO
    named: str = ""
    is_parallel: bool = True  # several calls in one answer

    @property
    def is_forced(self) -> bool:
        return self.choice in (REQUIRED, NAMED)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """What the prompt tells of; nothing where no call is wanted."""
        return () if self.choice == NONE else tuple(function.as_tool() for function in self.functions)


NO_TOOLS = Tools(functions=(), choice=NONE)


def read_tools(fields: Fields) -> Tools:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat.

    Raises:
        RequestError: 400, naming the field.
    """
    functions = tuple(_chat_function(x) for x in objects(fields, "tools"))
    choice, named = _chat_choice(fields)
    return make_tools(functions, choice, named, is_parallel=fields.flag("parallel_tool_calls") is not False)


def make_tools(functions: tuple[Function, ...], choice: str, named: str, *, is_parallel: bool) -> Tools:
    """Check what each part by itself cannot know. Raises RequestError."""
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise invalid(f"tools[{i}] has the name {name!r}, as another one before it", f"tools[{i}]")
    if choice in (REQUIRED, NAMED) and not functions:
        raise invalid("tool_choice demands a call, but tools offers no function", "tool_choice")
    if choice == NAMED and named not in names:
        raise invalid(f"tool_choice names {shown(named)}, which is not among tools", "tool_choice")
    if not functions:
        return NO_TOOLS
    return Tools(functions=functions, choice=choice, named=named, is_parallel=is_parallel)


def objects(fields: Fields, key: str) -> list[Fields]:
    """The objects of a list of tools, none where it is absent."""
    found = []
    for i, item in enumerate(fields.items(key, max_items=MAX_TOOLS) or []):
        path = f"{fields.name(key)}[{i}]"
        if not isinstance(item, dict):
            raise invalid(f"{path} must be an object, got {shown(item)}", path)
        found.append(Fields(item, path))
    return found


def _chat_function(tool: Fields) -> Function:
    check_kind(tool)
    inner = tool.object("function")
    if inner is None:
        raise invalid(f"{tool.name('function')} is missing", tool.name("function"))
    return read_function(Fields(inner, tool.name("function")), "parameters")


def check_kind(tool: Fields) -> None:
    """Refuse a tool that is no function. Raises RequestError."""
    kind = tool.text("type")
    if kind != "function":
        where = tool.name("type")
        if kind is None:
            raise invalid(f"{where} is missing: it must be function", where)
        raise not_yet(f"a tool of type {shown(kind)} (only function is)", where)


def read_function(fields: Fields, schema_key: str) -> Function:
    """Name, description and schema of one function. Raises RequestError."""
    name = fields.text("name")
    if name is None or not _NAME.fullmatch(name):
        where = fields.name("name")
        raise invalid(f"{where} must be 1 to 64 letters, digits, _, -, . or :, got {shown(name)}", where)
    strict = fields.flag("strict")
    description = fields.text("description", max_chars=MAX_DESCRIPTION_CHARS) or ""
    parameters = fields.object(schema_key)
    if parameters is not None and parameters.get("type", "object") != "object":
        where = fields.name(schema_key)
        raise invalid(f"{where} must be the schema of an object, got type {shown(parameters['type'])}", where)
    return Function(name=name, description=description, parameters=parameters, strict=strict)


def _chat_choice(fields: Fields) -> tuple[str, str]:
    value = fields.raw("tool_choice")
    if value is None:
        return AUTO, ""
    if isinstance(value, str):
        if value not in (AUTO, NONE, REQUIRED):
            raise invalid(f"tool_choice must be none, auto, required or a function, got {shown(value)}", "tool_choice")
        return value, ""
    if not isinstance(value, dict):
        raise invalid(f"tool_choice must be text or an object, got {shown(value)}", "tool_choice")
    inner = Fields(value, "tool_choice")
    check_kind(inner)
    function = Fields(inner.object("function") or {}, "tool_choice.function")
    name = function.text("name") if "function" in value else inner.text("name")
    if not name:
        raise invalid("tool_choice.function.name is missing", "tool_choice.function.name")
    return NAMED, name


def forced_grammar(tools: Tools) -> GrammarSpec:
    """What a forced answer looks like: the arguments of the named function, or a list of calls.

    Raises:
        RequestError: a schema that refers to what is not in it.
    """
    if tools.choice == NAMED:
        function = next(f for f in tools.functions if f.name == tools.named)
        return _spec(_ANY if function.parameters is None else function.parameters)
    hoisted = _Hoisted()
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f.name}, "arguments": hoisted.add(f.parameters or _ANY)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for f in tools.functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "maxItems": MAX_FORCED_CALLS if tools.is_parallel else 1,
    }
    if hoisted.definitions:
        schema["$defs"] = hoisted.definitions
    return _spec(schema)


def _spec(schema: Mapping[str, Any]) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


@dataclass(slots=True)
class _Hoisted:
    """Schemas that become parts of one: their definitions move to its top, under names of their own."""

    definitions: dict[str, Any] = field(default_factory=dict)
    _count: int = 0

    def add(self, schema: Mapping[str, Any]) -> Any:
        prefix = f"t{self._count}"
        self._count += 1
        own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        moved = _renamed(own, prefix)
        for key in ("$defs", "definitions"):
            inner = schema.get(key)
            for name, definition in inner.items() if isinstance(inner, dict) else ():
                self.definitions[f"{prefix}.{name}"] = _renamed(definition, prefix)
        if '"$ref": "#/$defs/' + prefix + '"' in json.dumps([moved, self.definitions]):
            self.definitions[prefix] = moved
        return moved


def _renamed(value: Any, prefix: str) -> Any:
    """The schema with its references led to where `_Hoisted` puts them. Depth is bounded by the body's."""
    if isinstance(value, list):
        return [_renamed(item, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _target(item, prefix) if key == "$ref" and isinstance(item, str) else _renamed(item, prefix)
        for key, item in value.items()
    }


def _target(reference: str, prefix: str) -> str:
    if reference == "#":
        return f"#/$defs/{prefix}"
    for place in ("#/$defs/", "#/definitions/"):
        if reference.startswith(place):
            return f"#/$defs/{prefix}.{reference.removeprefix(place)}"
    raise invalid(
        f"a tool's schema refers to {shown(reference)}; only #, #/$defs/… and #/definitions/… can be", "tools"
    )
