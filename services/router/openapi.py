"""The request bodies of the generating endpoints for /openapi.json: what is read, with types and bounds."""

from __future__ import annotations

from typing import Any

from services.router.messages import ROLES
from services.router.validate import INT64_MAX, MAX_PROMPTS, MAX_SALT_CHARS, MAX_STOP_CHARS, MAX_STOPS


def _nullable(kind: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": [kind, "null"], "description": description, **more}


_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_COMMON: dict[str, Any] = {
    "model": _nullable("string", "The served model; absent: that one."),
    "stream": _nullable("boolean", "Server-sent events instead of one document."),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _nullable("boolean", "A last chunk with the usage.")},
    },
    "max_tokens": _nullable("integer", "Longest answer; absent: what the context leaves.", minimum=1),
    "max_completion_tokens": _nullable("integer", "Another name of max_tokens.", minimum=1),
    "min_tokens": _nullable("integer", "No end token and no stop text counts before.", minimum=0),
    "temperature": _nullable("number", "0 is greedy.", minimum=0, maximum=2, default=1),
    "top_p": _nullable("number", "Nucleus sampling.", exclusiveMinimum=0, maximum=1, default=1),
    "top_k": _nullable("integer", "0, -1 and values past the vocabulary are off.", minimum=-1),
    "seed": _nullable("integer", "The same seed gives the same tokens.", minimum=-INT64_MAX - 1, maximum=INT64_MAX),
    "stop": {
        "anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}, {"type": "null"}],
        "description": "The answer ends before the first of these texts.",
    },
    "stop_token_ids": {**_IDS, "type": ["array", "null"], "description": "Further end tokens."},
    "ignore_eos": _nullable("boolean", "Go on past the model's end tokens."),
    "cache_salt": _nullable("string", "Requests share KV only under equal salts.", maxLength=MAX_SALT_CHARS),
    "priority": _nullable("integer", "Lower goes first."),
    "n": _nullable("integer", "Choices, each drawn by itself; at most router.max_n.", minimum=1),
    "best_of": _nullable("integer", "Only the value of n.", minimum=1),
    "min_p": _nullable(
        "number", "Tokens less likely than this share of the likeliest one never come.", minimum=0, maximum=1
    ),
    "presence_penalty": _nullable("number", "What a token loses for being in the answer.", minimum=-2, maximum=2),
    "frequency_penalty": _nullable("number", "What it loses each time it is in the answer.", minimum=-2, maximum=2),
    "repetition_penalty": _nullable("number", "Factor for tokens of prompt and answer.", exclusiveMinimum=0, maximum=2),
    "logit_bias": _nullable("object", "Token id → what its logit gains, from -100 to 100."),
    "prompt_logprobs": _nullable("integer", "Likeliest tokens told with each prompt token.", minimum=0, maximum=20),
    "response_format": _nullable("object", "type: text, json_object, or json_schema with the schema."),
    "structured_outputs": _nullable("object", "One of json, json_object, regex, choice and grammar."),
    "guided_json": {"description": "As structured_outputs.json; so are guided_regex, _choice and _grammar."},
    "user": _nullable("string", "Accepted, without effect."),
    "metadata": _nullable("object", "Accepted, without effect."),
    "prompt_cache_key": _nullable("string", "Accepted, without effect: prefixes are found by their tokens."),
}

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "Text or token ids; a list of prompts gives one choice each.",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(field: str, schema: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    body = {"type": "object", "properties": {field: schema, **_COMMON, **more}, "required": [field]}
    error = {"content": {"application/json": {"schema": _ERROR}}}
    refusals = {"400": "invalid request", "404": "unknown model", "413": "body too large", "415": "not JSON"}
    failures = {"503": "overloaded, or no workers", "504": "out of time"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {code: {"description": text, **error} for code, text in (refusals | failures).items()},
    }


CHAT = _operation(
    "messages",
    _MESSAGES,
    {
        "logprobs": _nullable("boolean", "Tell how likely each token was."),
        "top_logprobs": _nullable("integer", "And so many of the likeliest ones.", minimum=0, maximum=20),
    },
)
COMPLETION = _operation(
    "prompt",
    _PROMPT,
    {
        "echo": _nullable("boolean", "The answer begins with the prompt; max_tokens may be 0 then."),
        "logprobs": _nullable(
            "integer", "Tell how likely each token and the likeliest ones were.", minimum=0, maximum=20
        ),
    },
)
