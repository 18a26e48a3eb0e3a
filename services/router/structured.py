"""What an answer must look like, from the fields that say so: one `GrammarSpec` at most.

response_format     OpenAI's: text, json_object, json_schema
structured_outputs  vLLM's: json, json_object, regex, choice or grammar
guided_*            its older names
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.protocol.grammar import ANY_OBJECT, GrammarSpec
from services.router.fields import Fields, not_yet, shown

_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern")


def read_grammar(fields: Fields) -> tuple[GrammarSpec | None, str]:
    """What is asked for, and the field that asks. The text of the specification is not looked into.

    Raises:
        RequestError: a malformed field, or two that say different things.
    """
    found: list[tuple[GrammarSpec, str]] = []
    by_format = _response_format(fields)
    if by_format is not None:
        found.append((by_format, "response_format"))
    options = fields.object("structured_outputs")
    if options is not None:
        inner = Fields(options, "structured_outputs")
        found += [(spec, inner.name(key)) for key, spec in _options(inner)]
        for key in _WITHOUT_EFFECT:
            inner.raw(key)
        if inner.unread():
            raise invalid(f"structured_outputs has no {shown(inner.unread()[0])}", "structured_outputs")
        if not found:
            raise invalid("structured_outputs needs json, json_object, regex, choice or grammar", "structured_outputs")
    for key, read in _READERS.items():
        spec = read(fields, f"guided_{key}")
        if spec is not None:
            found.append((spec, f"guided_{key}"))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise invalid(f"{names} cannot be asked for together", found[1][1])
    return found[0] if found else (None, "")


def _response_format(fields: Fields) -> GrammarSpec | None:
    options = fields.object("response_format")
    if options is None:
        return None
    inner = Fields(options, "response_format")
    kind = inner.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(kind="json_schema", text=ANY_OBJECT)
    if kind == "structural_tag":
        raise not_yet("a response_format of type structural_tag", "response_format")
    if kind != "json_schema":
        raise invalid(
            f"response_format.type must be text, json_object or json_schema, got {shown(kind)}", "response_format.type"
        )
    wrapped = inner.object("json_schema")
    if wrapped is None:
        raise invalid("response_format.json_schema is missing", "response_format.json_schema")
    parts = Fields(wrapped, "response_format.json_schema")
    parts.flag("strict")
    parts.text("name")
    schema = _json(parts, "schema")
    if schema is None:
        raise invalid("response_format.json_schema.schema is missing", "response_format.json_schema.schema")
    return schema


def _options(inner: Fields) -> list[tuple[str, GrammarSpec]]:
    found = [(key, spec) for key, read in _READERS.items() if (spec := read(inner, key)) is not None]
    if inner.flag("json_object"):
        found.append(("json_object", GrammarSpec(kind="json_schema", text=ANY_OBJECT)))
    return found


def _json(fields: Fields, key: str) -> GrammarSpec | None:
    """A schema as an object, or as its text."""
    value = fields.raw(key)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(f"{fields.name(key)} is not valid JSON", fields.name(key)) from None
    if not isinstance(value, dict | bool):
        raise invalid(f"{fields.name(key)} must be a JSON schema, got {shown(value)}", fields.name(key))
    return GrammarSpec(kind="json_schema", text=json.dumps(value, ensure_ascii=False))


def _regex(fields: Fields, key: str) -> GrammarSpec | None:
    return _text(fields, key, "regex")


def _grammar(fields: Fields, key: str) -> GrammarSpec | None:
    return _text(fields, key, "grammar")


def _text(fields: Fields, key: str, kind: str) -> GrammarSpec | None:
    text = fields.text(key)
    if text is None:
        return None
    if not text:
        raise invalid(f"{fields.name(key)} must not be empty", fields.name(key))
    return GrammarSpec(kind=kind, text=text)


def _choice(fields: Fields, key: str) -> GrammarSpec | None:
    texts: list[Any] | None = fields.items(key, max_items=2**31)
    if texts is None:
        return None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise invalid(f"{fields.name(key)} must be a list of texts, none of them empty", fields.name(key))
    return GrammarSpec(kind="choice", text=json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))


_READERS: dict[str, Callable[[Fields, str], GrammarSpec | None]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def with_field(error: RequestError, field: str) -> RequestError:
    """The error of a check, which does not know what the client called it."""
    error.param = error.param or field
    return error
