"""A request's fields, checked one by one before anything is tokenized; then its limits, once the prompt is.

Where servers differ: max_tokens 0 is an error (but for completions with echo), so is the stop text ""; top_k past the
vocabulary is off; both token limits may be given if they are equal; a start token alone is a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.extras import Extras, check_features, read_extras
from services.router.fields import Fields, not_yet, shown, whole
from services.router.messages import read_messages
from services.router.shaping import read_shaping
from services.router.template import ChatOptions, Message
from services.router.text import too_long
from services.router.tools.spec import NO_TOOLS, Tools, forced_grammar, read_tools
from services.router.types import SamplingSpec, Shaping

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PROMPTS = 16
MAX_SALT_CHARS = 256
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
ANY_COUNT = 2**62
"""Upper bound where only the context limits a number of tokens."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked request. Exactly one of ``prompts`` and ``messages`` is not empty."""

    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Message, ...] = ()
    stream: bool = False
    include_usage: bool = False  # in a stream; always told otherwise
    echo: bool = False
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None  # None: what the context leaves
    max_tokens_field: str = "max_tokens"  # as the client wrote it
    min_tokens: int = 0
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    shaping: Shaping = field(default_factory=Shaping)
    salt: str = ""
    priority: int = 0
    slo: Mapping[str, Any] | None = None  # targets; checked where the headers' are
    tools: Tools = NO_TOOLS
    extras: Extras = field(default_factory=Extras)
    ignored: tuple[str, ...] = ()  # fields that nobody knows

    @property
    def chat_options(self) -> ChatOptions:
        extras = self.extras
        return ChatOptions(
            tools=self.tools.offered,
            add_generation_prompt=extras.add_generation_prompt,
            variables=extras.variables,
        )

    def sampling(self, prompt_tokens: int, context: int, capacity: int = 0) -> SamplingSpec:
        """The limits and the way to sample for a prompt of ``prompt_tokens``.

        An answer without a limit of its own may fill the context, but not more than the ``capacity`` that workers have
        KV for (0: not known).

        Raises:
            RequestError: the context does not hold prompt and answer; the message has the numbers.
        """
        room = context - prompt_tokens
        asked = self.max_tokens
        if room < (0 if asked == 0 else 1):
            raise too_long(prompt_tokens, context, param="messages" if self.messages else "prompt")
        if asked is not None and asked > room:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {prompt_tokens} tokens and {self.max_tokens_field} is {asked}: together more than "
                f"the context of {context} tokens.",
                param=self.max_tokens_field,
            )
        limit = room if asked is None else asked
        if asked is None and capacity > prompt_tokens:
            limit = min(room, capacity - prompt_tokens)
        if self.min_tokens > limit:
            raise _min_above_max(self.min_tokens, limit)
        return SamplingSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=limit,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            shaping=self.shaping,
        )


def chat_ask(body: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """Check the body of /v1/chat/completions.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields = Fields(body)
    check_model(fields, model)
    common = read_common(fields, vocab_size, echo=False)
    shaping = read_shaping(fields, vocab_size, is_chat=True)
    messages = read_messages(fields)
    tools = read_tools(fields)
    extras = read_extras(fields, is_chat=True)
    shaping = with_tools(shaping, tools)
    return Ask(messages=messages, shaping=shaping, tools=tools, extras=extras, **common, ignored=fields.unread())


def with_tools(shaping: Shaping, tools: Tools) -> Shaping:
    """A demanded call is a grammar of its own. Raises RequestError where the request brings another."""
    if tools.offered and shaping.grammar is not None:
        raise not_yet("tools together with a format of the answer", shaping.grammar_field)
    return replace(shaping, grammar=forced_grammar(tools), grammar_field="tools") if tools.is_forced else shaping


def completion_ask(body: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """Check the body of /v1/completions; a gRPC request takes the same way.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields = Fields(body)
    check_model(fields, model)
    echo = bool(fields.flag("echo"))
    common = read_common(fields, vocab_size, echo=echo)
    shaping = read_shaping(fields, vocab_size, is_chat=False, echo=echo)
    prompts = _prompts(fields, vocab_size)
    fields.only("tools", ([],), "calling tools in a completion (use /v1/chat/completions)")
    extras = read_extras(fields, is_chat=False)
    return Ask(prompts=prompts, echo=echo, shaping=shaping, extras=extras, **common, ignored=fields.unread())


def check_model(fields: Fields, model: str) -> None:
    """The field ``model`` names the served one, or nothing. Raises RequestError MODEL_NOT_FOUND."""
    require_model(fields.text("model"), model)


def require_model(asked: str | None, model: str) -> None:
    """Refuse another name than that of the served model. Raises RequestError MODEL_NOT_FOUND."""
    if asked is not None and asked != model:
        message = f"The model {shown(asked)} does not exist here; this server has {model!r}"
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, param="model")


def read_common(fields: Fields, vocab_size: int, *, echo: bool) -> dict[str, Any]:
    """Fields of `Ask` that the generating endpoints share."""
    check_features(fields)
    stream = bool(fields.flag("stream"))
    max_tokens, max_tokens_field = _max_tokens(fields, echo=echo)
    return {
        "stream": stream,
        "n": _n(fields),
        "include_usage": _include_usage(fields, stream=stream),
        "temperature": _default(fields.number("temperature", 0, 2), 1.0),
        "top_p": _default(fields.number("top_p", 0, 1, above_low=True), 1.0),
        "top_k": _top_k(fields, vocab_size),
        "seed": fields.integer("seed", -INT64_MAX - 1, INT64_MAX),
        "max_tokens": max_tokens,
        "max_tokens_field": max_tokens_field,
        "min_tokens": _min_tokens(fields, max_tokens),
        "ignore_eos": bool(fields.flag("ignore_eos")),
        "stops": _stops(fields),
        "stop_token_ids": _stop_token_ids(fields, vocab_size),
        "salt": fields.text("cache_salt", max_chars=MAX_SALT_CHARS) or "",
        "slo": fields.object("slo"),
        "priority": fields.integer("priority", -INT32_MAX - 1, INT32_MAX) or 0,
    }


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _n(fields: Fields) -> int:
    """Choices of each prompt; to draw more of them than are given out is not there."""
    n = fields.integer("n", 1, INT32_MAX) or 1
    best_of = fields.integer("best_of", 1, INT32_MAX)
    if best_of not in (None, n):
        raise not_yet(f"best_of ({best_of}) other than n ({n})", "best_of")
    return n


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
    inner = Fields(options, "stream_options")
    inner.flag("include_obfuscation")
    inner.only("continuous_usage_stats", (False,), "usage in every chunk")
    return bool(inner.flag("include_usage"))


def _max_tokens(fields: Fields, *, echo: bool) -> tuple[int | None, str]:
    low = 0 if echo else 1
    old = fields.integer("max_tokens", low, ANY_COUNT)
    new = fields.integer("max_completion_tokens", low, ANY_COUNT)
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", "max_completion_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _min_tokens(fields: Fields, max_tokens: int | None) -> int:
    least = fields.integer("min_tokens", 0, ANY_COUNT) or 0
    if max_tokens is not None and least > max_tokens:
        raise _min_above_max(least, max_tokens)
    return least


def _min_above_max(least: int, limit: int) -> RequestError:
    return invalid(f"min_tokens is {least}, more than the {limit} tokens that the answer may have", "min_tokens")


def _top_k(fields: Fields, vocab_size: int) -> int:
    """0 is off; so are −1 and what the vocabulary does not reach."""
    top_k = fields.integer("top_k", -1, ANY_COUNT) or 0
    return top_k if 0 < top_k < vocab_size else 0


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    items = [value] if isinstance(value, str) else fields.items("stop", max_items=MAX_STOPS) or []
    for item in items:
        if not isinstance(item, str):
            raise invalid(f"stop must be text or a list of texts, got {shown(item)}", "stop")
        if not item:
            raise invalid("stop must not hold an empty text", "stop")
        if len(item) > MAX_STOP_CHARS:
            raise invalid(f"a stop text has {len(item)} characters, at most {MAX_STOP_CHARS} are allowed", "stop")
    return tuple(dict.fromkeys(items))


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    items = fields.items("stop_token_ids", max_items=MAX_STOP_TOKEN_IDS) or []
    return token_ids(items, vocab_size, "stop_token_ids")


def _prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if value is None:
        raise invalid("prompt is missing", "prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid(f"prompt must be text, token ids, or a list of either, got {shown(value)}", "prompt")
    if not value:
        raise invalid("prompt is an empty list", "prompt")
    if not isinstance(value[0], str | list):
        return (token_ids(value, vocab_size, "prompt"),)
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
    return tuple(_one_prompt(item, value[0], vocab_size, f"prompt[{i}]") for i, item in enumerate(value))


def _one_prompt(item: Any, first: Any, vocab_size: int, path: str) -> Prompt:
    if type(item) is not type(first):
        raise invalid(f"{path} is not of the same kind as the prompts before it, got {shown(item)}", path)
    if isinstance(item, str):
        return item
    if not item:
        raise invalid(f"{path} is an empty list of token ids", path)
    return token_ids(item, vocab_size, path)


def token_ids(items: Sequence[Any], vocab_size: int, path: str) -> tuple[int, ...]:
    """Check ids against the vocabulary.

    Raises:
        RequestError: one is no whole number from 0 to vocab_size − 1.
    """
    ids = tuple(whole(item) for item in items)
    for i, token_id in enumerate(ids):
        if token_id is None or not 0 <= token_id < vocab_size:
            raise invalid(
                f"{path}[{i}] must be a token id from 0 to {vocab_size - 1}, got {shown(items[i])}", f"{path}[{i}]"
            )
    return ids  # type: ignore[return-value]
