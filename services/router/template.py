"""Chat messages to prompt text, as the model's own jinja2 template says: equal to transformers' apply_chat_template.

The template comes with the model, so it runs in jinja2's immutable sandbox: it can read messages and nothing else.
Does not tokenize, and gives templates neither tools nor documents yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvstore.errors import ConfigError
from services.protocol.errors import RequestError, invalid

Message = Mapping[str, Any]
"""One chat message: role, content, and where given name, tool_calls, tool_call_id; no value is None."""


class _Generation(Extension):
    """Accepts ``{% generation %}…{% endgeneration %}``, which only training needs, as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare them

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template. Rendering is pure but for the date it may ask for; safe to call from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        wall_clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """``special_tokens``: bos_token, eos_token and so on, by the names the template uses.

        Raises:
            ConfigError: the source is no jinja2 template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: wall_clock().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"model.path: the model's chat template does not compile: {exc}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text.

        Raises:
            RequestError: the template refuses these messages (an order of roles it does not know, say).
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as exc:
            raise invalid(f"the model's chat template refuses these messages: {exc}", "messages") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as exc:
            raise invalid(
                f"the model's chat template cannot render these messages: {type(exc).__name__}: {exc}", "messages"
            ) from None


def no_template() -> RequestError:
    """The answer to a chat request where the model has no template."""
    return invalid("the served model has no chat template; use /v1/completions", "messages")
