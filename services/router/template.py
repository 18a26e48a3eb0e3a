"""Chat messages to prompt text, as the model's own jinja2 template says: equal to transformers' apply_chat_template.

The template comes with the model, so it runs in jinja2's immutable sandbox: it can read messages and nothing else.
Does not tokenize, and gives templates no documents yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvstore.errors import ConfigError
from services.protocol.errors import RequestError, invalid
from services.router.tools.parsers import HERMES
from services.router.tools.prompt import AUTO, format_of, with_instructions

Message = Mapping[str, Any]
"""One chat message: role, content, and where given name, tool_calls, tool_call_id; no value is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What beside the messages shapes a chat's prompt."""

    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template; see `validate.TEMPLATE_VARIABLES`

    @property
    def chars(self) -> int:
        """Of the tools, about; they are part of the prompt."""
        return len(json.dumps(list(self.tools), ensure_ascii=False)) if self.tools else 0


DEFAULT_OPTIONS = ChatOptions()


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
        tool_parser: str = AUTO,
    ) -> None:
        """``special_tokens``: bos_token, eos_token and so on, by the names the template uses. ``tool_parser``: as in
        config.model.

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
            reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as exc:
            raise ConfigError(f"model.path: the model's chat template does not compile: {exc}") from None
        known = format_of(source, tool_parser)
        self._is_told_of_tools = reads_tools and bool(known)
        self.call_format = known if self._is_told_of_tools else HERMES
        """The format in which calls of functions are looked for in answers."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text. The parameters are the fields of `ChatOptions`.

        Raises:
            RequestError: the template refuses these messages (an order of roles it does not know, say).
        """
        given, offered = list(messages), None
        if tools and self._is_told_of_tools:
            offered = [dict(tool) for tool in tools]
        elif tools:
            given = with_instructions(messages, tools)
        fixed = {"messages": given, "tools": offered, "documents": None}
        try:
            return self._template.render(
                {**variables, **self._special_tokens, **fixed}, add_generation_prompt=add_generation_prompt
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
