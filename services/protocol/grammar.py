"""What an answer must look like: a JSON schema, a regular expression, one of some texts, or a grammar.

    client ─► read and bounded ─► `check` (router: syntax, in Rust, with fuel) ─► worker: compiled before it computes

The specification travels as the client wrote it, and every worker that needs it compiles it again. JSON comes without
free whitespace, one space after each comma and colon, so a small model cannot fill an answer with blanks; objects with
``properties`` are closed unless the schema says otherwise. Both rules narrow the schema, they never widen it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.protocol.errors import invalid

KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_TEXT_CHARS = 64 << 10
MAX_REGEX_CHARS = 4096
MAX_DEPTH = 32
"""Schemas inside one another."""
MAX_ENUM_VALUES = 1000
"""In a whole schema; also the texts of a choice."""
MAX_PROPERTIES = 500
MAX_RULES = 200
"""Of a grammar; a long chain of them is followed by recursion."""
ANY_OBJECT = '{"type": "object"}'

_SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MANY_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COMBINING = {"properties", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"}
_SAYS_OF_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One of KINDS and its text: a schema or a list of texts as JSON, a regular expression, or EBNF or Lark rules."""

    kind: str
    text: str

    @property
    def is_ebnf(self) -> bool:
        """A grammar in the notation ``rule ::= …``; Lark writes ``rule: …``."""
        return self.kind == "grammar" and "::=" in self.text


def subschemas(schema: Any) -> Iterator[Any]:
    """The schemas directly inside one; values of enum, const, default and examples are none."""
    if not isinstance(schema, Mapping):
        return
    for key in _MANY_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _ONE_SCHEMA:
        if key in schema:
            yield schema[key]


def all_schemas(schema: Any) -> Iterator[Any]:
    """A schema and everything inside it, level by level, without recursion.

    Raises:
        RequestError: deeper than MAX_DEPTH.
    """
    level = [schema]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        yield from level
        level = [inner for outer in level for inner in subschemas(outer)]
    if level:
        raise invalid(f"the schema nests deeper than {MAX_DEPTH} levels")


def check_bounds(spec: GrammarSpec) -> None:
    """Raise RequestError for what would take too long, or too much memory, to compile."""
    limit = MAX_REGEX_CHARS if spec.kind == "regex" else MAX_TEXT_CHARS
    if len(spec.text) > limit:
        raise invalid(f"the {spec.kind} has {len(spec.text)} characters, at most {limit} are allowed")
    if spec.kind == "choice":
        _check_count("texts of the choice", len(json.loads(spec.text)), MAX_ENUM_VALUES)
    if spec.kind == "grammar":
        _check_count("rules of the grammar", sum(":" in line for line in spec.text.splitlines()), MAX_RULES)
    if spec.kind != "json_schema":
        return
    schemas = [s for s in all_schemas(json.loads(spec.text)) if isinstance(s, Mapping)]
    _check_count("enum values of the schema", sum(_size(s.get("enum")) for s in schemas), MAX_ENUM_VALUES)
    _check_count("properties of the schema", sum(_size(s.get("properties")) for s in schemas), MAX_PROPERTIES)


def repeats_inside_repeats(text: str) -> bool:
    """Whether an expression or EBNF repeats a group that repeats something itself; ``?`` repeats nothing.

    Such nests multiply: a library without a bound on its work may take for ever over one step.
    """
    text = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\"(?:\\.|[^\"\\])*\"", "x", text, flags=re.DOTALL)
    repeated: list[bool] = [False]  # for each open group: whether anything in it is repeated
    closed_repeats = False  # the same of the group that has just closed
    for i, char in enumerate(text):
        if char == "(":
            repeated.append(False)
        elif char == ")" and len(repeated) > 1:
            closed_repeats = repeated.pop()
            repeated[-1] |= closed_repeats
        elif char in "*+{":
            if i and text[i - 1] == ")" and closed_repeats:
                return True
            repeated[-1] = True
    return False


def required_names(schema: Mapping[str, Any]) -> set[str]:
    """Properties that must be there; what is no name is left to the libraries to refuse."""
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | Mapping) else 0


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise invalid(f"the {what} are {count}, at most {most} are allowed")


def closed(schema: Any) -> Any:
    """A copy in which an object that lists its properties has no others, unless it says what others may be.

    Where several schemas speak of one object (allOf, or properties beside anyOf or $ref) it is left as it is: a closed
    part would shut out what the other parts ask for.
    """
    schemas = [s for s in all_schemas(schema) if isinstance(s, Mapping)]
    return _closed(schema, {"$defs", "definitions"} if any("allOf" in s for s in schemas) else set())


def _closed(schema: Any, kept: set[str]) -> Any:
    if not isinstance(schema, Mapping) or len(_COMBINING & schema.keys()) > 1 or "allOf" in schema:
        return schema
    copy: dict[str, Any] = dict(schema)
    for key in copy.keys() & (set(_MANY_SCHEMAS) - kept):
        if isinstance(copy[key], Mapping):
            copy[key] = {name: _closed(inner, kept) for name, inner in copy[key].items()}
    for key in copy.keys() & set(_LISTS):
        if isinstance(copy[key], list):
            copy[key] = [_closed(inner, kept) for inner in copy[key]]
    for key in copy.keys() & set(_ONE_SCHEMA):
        copy[key] = _closed(copy[key], kept)
    properties = copy.get("properties")
    is_listed = isinstance(properties, Mapping) and required_names(copy) <= properties.keys()
    if is_listed and not _SAYS_OF_OTHERS & copy.keys():
        copy["additionalProperties"] = False
    return copy


def schema_text(spec: GrammarSpec) -> str:
    """The `closed` schema as JSON, keys in the client's order."""
    return json.dumps(closed(json.loads(spec.text)), ensure_ascii=False)


def guidance_source(spec: GrammarSpec) -> str:
    """The specification as llguidance takes it. Raises ValueError where it cannot be brought to that form."""
    from llguidance import LLMatcher, grammar_from

    if spec.kind == "json_schema":
        source: str = LLMatcher.grammar_from_json_schema(schema_text(spec), overrides=_SEPARATORS)
        return source
    if spec.kind == "choice":
        rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
        return LLMatcher.grammar_from_lark(f"start: {rules}")
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    return grammar_from("grammar" if spec.is_ebnf else "lark", spec.text)


def check(spec: GrammarSpec) -> None:
    """Raise RequestError unless the specification is bounded and well-formed. Takes up to a second; holds no lock.

    EBNF is only bounded here: its reader is the worker's, which refuses a bad one before it computes anything.
    """
    from llguidance import LLMatcher

    try:
        check_bounds(spec)
        wrong = "" if spec.is_ebnf else LLMatcher.validate_grammar(guidance_source(spec))
    except (ValueError, RecursionError) as exc:
        wrong = str(exc) or type(exc).__name__
    if wrong and not wrong.startswith("WARNING"):
        raise invalid(f"the {spec.kind} cannot be used: {one_line(wrong)}")


def one_line(message: str, limit: int = 300) -> str:
    """A library's message as a client may see it."""
    message = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message.partition("<state>")[0])  # without places in its source
    line = "; ".join(x.strip() for x in message.splitlines() if x.strip(" ^|"))
    return line[:limit].encode("utf-8", "replace").decode()
