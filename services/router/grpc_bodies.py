"""Messages of pdray.v1.Inference as bodies of the OpenAI API, so that one set of rules checks both, and answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.protocol.proto import inference_pb2
from services.router.answers import Answer, Delta
from services.router.body import parse_object
from services.router.types import TokenLogprobs

_OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_TOOL_CHOICES = ("none", "auto", "required")


def generate_body(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """The body of a completion."""
    body = _sampling(request.sampling)
    body["model"] = request.model or None
    body["cache_salt"] = request.cache_salt
    kind = request.WhichOneof("input")
    if kind is not None:
        body["prompt"] = request.prompt if kind == "prompt" else list(request.token_ids.ids)
    return body


def embed_body(request: inference_pb2.EmbedRequest) -> dict[str, Any]:
    """The body of an embedding request.

    Raises:
        RequestError: both texts and token ids.
    """
    if request.texts and request.token_ids:
        raise invalid("give either texts or token_ids", "token_ids")
    body: dict[str, Any] = {"model": request.model or None}
    body["input"] = [list(ids.ids) for ids in request.token_ids] or list(request.texts)
    if request.HasField("normalize"):
        body["normalize"] = request.normalize
    return body


def chat_body(request: inference_pb2.ChatRequest) -> dict[str, Any]:
    """The body of a chat completion.

    Raises:
        RequestError: parameters of a tool that are no JSON.
    """
    body = _sampling(request.sampling)
    if (logprobs := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    body["model"] = request.model or None
    body["cache_salt"] = request.cache_salt
    body["messages"] = messages_body(request.messages)
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice:
        named = {"type": "function", "function": {"name": request.tool_choice}}
        body["tool_choice"] = request.tool_choice if request.tool_choice in _TOOL_CHOICES else named
    return body


def messages_body(messages: Iterable[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """The field ``messages`` of a chat completion."""
    return [_message(message) for message in messages]


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        body["name"] = message.name
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _tool(tool: inference_pb2.Tool, path: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json:
        try:
            function["parameters"] = parse_object(tool.parameters_json.encode())
        except RequestError as exc:
            raise invalid(f"{path}.parameters_json: {exc.message}", f"{path}.parameters_json") from None
    return {"type": "function", "function": function}


def _sampling(sampling: inference_pb2.SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {"stop": list(sampling.stop), "ignore_eos": sampling.ignore_eos}
    for name in _OPTIONAL:
        if sampling.HasField(name):
            body[name] = getattr(sampling, name)
    body["logit_bias"] = {str(token_id): value for token_id, value in sampling.logit_bias.items()}
    if sampling.HasField("structured_outputs"):
        body["structured_outputs"] = _structured(sampling.structured_outputs)
    body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


def _structured(options: inference_pb2.StructuredOutputs) -> dict[str, Any]:
    kind = options.WhichOneof("kind")
    if kind is None:
        return {}
    value = getattr(options, kind)
    return {kind: list(value.texts) if kind == "choice" else value}


def piece(answer: Answer, delta: Delta, request_id: str, *, is_first: bool) -> inference_pb2.GenerateResponse:
    """What is new, as a message of the stream."""
    message = inference_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        choice=delta.choice,
    )
    message.logprobs.extend(told(x) for x in delta.logprobs)
    for call in delta.calls:
        message.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    if is_first and answer.request.sampling.shaping.prompt_logprobs is not None:
        message.prompt_logprobs.extend(told(x) for x in answer.prompt_logprobs)
    if answer.is_complete:
        message.usage.CopyFrom(usage(answer))
    return message


def told(x: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=x.token_id,
        logprob=x.logprob,
        rank=x.rank,
        top_ids=[token_id for token_id, _ in x.top],
        top_logprobs=[logprob for _, logprob in x.top],
    )


def usage(answer: Answer) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
    )
