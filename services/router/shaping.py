"""Fields that change how tokens are drawn, or ask how likely they were."""

from __future__ import annotations

from services.protocol.errors import invalid
from services.router.fields import Fields, shown
from services.router.structured import read_grammar
from services.router.types import Shaping

MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
BIAS_LIMIT = 100.0
PENALTY_LIMIT = 2.0


def read_shaping(fields: Fields, vocab_size: int, *, is_chat: bool, echo: bool = False) -> Shaping:
    """The checked fields.

    Raises:
        RequestError: 400; ``param`` names the field at fault.
    """
    logprobs = _chat_logprobs(fields) if is_chat else _completion_logprobs(fields)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None and fields.flag("stream"):
        raise invalid("prompt_logprobs are not told in a stream; use echo with logprobs there", "prompt_logprobs")
    repetition = fields.number("repetition_penalty", 0, PENALTY_LIMIT, above_low=True)
    grammar, grammar_field = read_grammar(fields)
    return Shaping(
        min_p=fields.number("min_p", 0, 1) or 0.0,
        presence_penalty=fields.number("presence_penalty", -PENALTY_LIMIT, PENALTY_LIMIT) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -PENALTY_LIMIT, PENALTY_LIMIT) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(fields, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo_logprobs=logprobs if echo else None,
        grammar=grammar,
        grammar_field=grammar_field,
    )


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.flag("logprobs"):
        return top or 0
    if top:
        raise invalid(f"top_logprobs is {top}, but logprobs is not true", "top_logprobs")
    return None


def _completion_logprobs(fields: Fields) -> int | None:
    if fields.raw("logprobs") is False:
        return None
    return fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token ids stand as text, as keys of JSON do."""
    given = fields.object("logit_bias") or {}
    if len(given) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(given)} entries, at most {MAX_BIASES} are allowed", "logit_bias")
    values = Fields(given, "logit_bias")
    biases: dict[int, float] = {}
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(f"logit_bias must name token ids from 0 to {vocab_size - 1}, got {shown(key)}", "logit_bias")
        value = values.number(key, -BIAS_LIMIT, BIAS_LIMIT)
        if value is not None:
            biases[int(key)] = value
    return tuple(sorted(biases.items()))
