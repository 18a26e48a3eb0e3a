"""Fields beside sampling and messages: what shapes the prompt's text, and what is told beside the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.router.features import KNOWN_WITHOUT_EFFECT, NEVER, NOT_THERE
from services.router.fields import Fields, not_yet, shown

MAX_LABEL_CHARS = 512
MAX_METADATA = 16
MAX_VARIABLE_CHARS = 64
TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "verbosity")
"""What a request may set for the model's template; all else could break the prompt's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """See the module's text."""

    is_bare: bool = False  # no start token before a plain prompt
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False


def read_extras(fields: Fields, *, is_chat: bool) -> Extras:
    """The checked fields.

    Raises:
        RequestError: 400; ``param`` names the field at fault.
    """
    return_token_ids = bool(fields.flag("return_token_ids"))
    if not is_chat:
        return Extras(is_bare=fields.flag("add_special_tokens") is False, return_token_ids=return_token_ids)
    fields.only("add_special_tokens", (False,), "a start token before the chat's template")
    return Extras(
        add_generation_prompt=fields.flag("add_generation_prompt") is not False,
        variables=_variables(fields),
        return_token_ids=return_token_ids,
    )


def check_features(fields: Fields) -> None:
    """Refuse what is asked for and not there, and check the form of what has no effect. Raises RequestError."""
    for key, (neutral, what) in NOT_THERE.items():
        fields.only(key, neutral, what)
    for key, (neutral, why) in NEVER.items():
        fields.never(key, neutral, why)
    fields.only("skip_special_tokens", (True,), "special tokens in the text")
    for key in ("user", "prompt_cache_key", "safety_identifier"):
        fields.text(key, max_chars=MAX_LABEL_CHARS)
    for key in KNOWN_WITHOUT_EFFECT:
        fields.raw(key)
    _check_metadata(fields)


def _check_metadata(fields: Fields) -> None:
    given = fields.object("metadata") or {}
    if len(given) > MAX_METADATA:
        raise invalid(f"metadata has {len(given)} entries, at most {MAX_METADATA} are allowed", "metadata")
    inner = Fields(given, "metadata")
    for key in given:
        inner.text(key, max_chars=MAX_LABEL_CHARS)


def _variables(fields: Fields) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs") or {}
    inner = Fields(given, "chat_template_kwargs")
    found: dict[str, Any] = {}
    for key in TEMPLATE_VARIABLES:
        value = inner.raw(key)
        if value is not None:
            found[key] = _variable(value, inner.name(key))
    if inner.unread():
        raise _unknown_variable(inner.unread()[0])
    for key in ("reasoning_effort", "verbosity"):
        text = fields.text(key, max_chars=MAX_VARIABLE_CHARS)
        if text is not None:
            found[key] = text
    return found


def _variable(value: Any, path: str) -> bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= MAX_VARIABLE_CHARS:
        return value
    raise invalid(f"{path} must be true, false or a text of at most {MAX_VARIABLE_CHARS}, got {shown(value)}", path)


def _unknown_variable(key: str) -> RequestError:
    known = ", ".join(TEMPLATE_VARIABLES)
    return not_yet(f"{shown(key)} in chat_template_kwargs (only {known})", "chat_template_kwargs")
