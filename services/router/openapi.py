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


_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,64}$"},
                "description": _TEXT,
                "parameters": _OBJECT,
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_TOOLS: dict[str, Any] = {
    "tools": {"type": ["array", "null"], "items": _FUNCTION, "description": "Functions the model may call."},
    "tool_choice": {
        "anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT, {"type": "null"}],
        "description": "required, or the name of one, is forced by a grammar.",
    },
    "parallel_tool_calls": _nullable("boolean", "false: at most one call.", default=True),
}
_RETURN_IDS = _nullable("boolean", "Tell token ids beside the text, as vLLM does.")


def _operation(body: dict[str, Any]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": _ERROR}}}
    refusals = {"400": "invalid request", "401": "no valid API key", "403": "the key does not allow it"}
    refusals |= {"404": "unknown model", "413": "body too large", "415": "not JSON", "429": "over a limit"}
    failures = {"503": "overloaded, or no workers", "504": "out of time"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {code: {"description": text, **error} for code, text in (refusals | failures).items()},
    }


def _body(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


CHAT = _operation(
    _body(
        ["messages"],
        {
            "messages": _MESSAGES,
            **_COMMON,
            **_TOOLS,
            "logprobs": _nullable("boolean", "Tell how likely each token was."),
            "top_logprobs": _nullable("integer", "And so many of the likeliest ones.", minimum=0, maximum=20),
            "return_token_ids": _RETURN_IDS,
            "add_generation_prompt": _nullable("boolean", "false: the prompt ends with the last message."),
            "reasoning_effort": _nullable("string", "For templates that read it."),
            "chat_template_kwargs": _nullable("object", "enable_thinking, thinking, reasoning_effort, verbosity."),
        },
    )
)
COMPLETION = _operation(
    _body(
        ["prompt"],
        {
            "prompt": _PROMPT,
            **_COMMON,
            "echo": _nullable("boolean", "The answer begins with the prompt; max_tokens may be 0 then."),
            "logprobs": _nullable(
                "integer", "Tell how likely each token and the likeliest ones were.", minimum=0, maximum=20
            ),
            "return_token_ids": _RETURN_IDS,
            "add_special_tokens": _nullable("boolean", "false: no start token before the prompt."),
        },
    )
)
RESPONSES = _operation(
    _body(
        ["input"],
        {
            "model": _COMMON["model"],
            "input": {
                "anyOf": [_TEXT, {"type": "array", "items": _OBJECT, "minItems": 1}],
                "description": "Text, or messages, function calls and their outputs.",
            },
            "instructions": _nullable("string", "A system message before the input."),
            "stream": _COMMON["stream"],
            "max_output_tokens": _nullable("integer", "Longest answer.", minimum=1),
            "temperature": _COMMON["temperature"],
            "top_p": _COMMON["top_p"],
            "text": _nullable("object", "format: text, json_object, or json_schema with name and schema."),
            "tools": {"type": ["array", "null"], "items": _OBJECT, "description": "Functions the model may call."},
            "tool_choice": _TOOLS["tool_choice"],
            "parallel_tool_calls": _TOOLS["parallel_tool_calls"],
            "store": _nullable("boolean", "Only false: nothing is stored."),
            "include": {"type": ["array", "null"], "items": {"enum": ["message.output_text.logprobs"]}},
            "top_logprobs": _nullable("integer", "Likeliest tokens told with each.", minimum=0, maximum=20),
            "metadata": _nullable("object", "Repeated in the answer."),
        },
    )
)
_CLAUDE_CHAT = {
    "model": _COMMON["model"],
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
            },
            "required": ["role", "content"],
        },
    },
    "system": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
    "tools": {"type": ["array", "null"], "items": _OBJECT, "description": "name, description, input_schema."},
    "tool_choice": _nullable("object", "type: auto, any, tool (with name) or none."),
}
MESSAGES_API = _operation(
    _body(
        ["messages", "max_tokens"],
        {
            **_CLAUDE_CHAT,
            "max_tokens": {"type": "integer", "minimum": 1, "description": "Longest answer."},
            "stop_sequences": {"type": ["array", "null"], "items": _STOP_TEXT, "maxItems": MAX_STOPS},
            "stream": _COMMON["stream"],
            "temperature": _COMMON["temperature"],
            "top_p": _COMMON["top_p"],
            "top_k": _COMMON["top_k"],
        },
    )
)
COUNT_TOKENS = _operation(_body(["messages"], _CLAUDE_CHAT))
TOKENIZE = _operation(
    _body(
        [],
        {
            "model": _COMMON["model"],
            "prompt": _nullable("string", "Text; or"),
            "messages": {**_MESSAGES, "type": ["array", "null"]},
            "tools": _TOOLS["tools"],
            "add_special_tokens": _nullable("boolean", "false: no start token before a prompt."),
            "add_generation_prompt": _nullable("boolean", "false: a chat ends with its last message."),
            "return_token_strs": _nullable("boolean", "Tell the tokens as the vocabulary writes them, too."),
        },
    )
)
DETOKENIZE = _operation(_body(["tokens"], {"model": _COMMON["model"], "tokens": _IDS}))
_SOME_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_SOME_IDS = {**_IDS, "minItems": 1}
_TEXTS = {"anyOf": [_TEXT, _SOME_TEXTS]}
EMBEDDINGS = _operation(
    _body(
        ["input"],
        {
            "model": _COMMON["model"],
            "input": {"anyOf": [_TEXT, _SOME_TEXTS, _SOME_IDS, {"type": "array", "items": _SOME_IDS, "minItems": 1}]},
            "encoding_format": {"enum": ["float", "base64", None], "description": "float by default."},
            "dimensions": _nullable("integer", "Only the size of the model's vectors.", minimum=1),
            "normalize": _nullable("boolean", "false: the mean itself, not brought to the length 1."),
            "add_special_tokens": _nullable("boolean", "false: no start token before a text."),
            "priority": _COMMON["priority"],
        },
    )
)
SCORE = _operation(_body(["text_1", "text_2"], {"model": _COMMON["model"], "text_1": _TEXTS, "text_2": _TEXTS}))
