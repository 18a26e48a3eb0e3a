"""What `services.protocol.client` takes and gives, and the messages it is sent as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.protocol.proto import inference_pb2, open_inference_pb2

_LARGEST_LABEL = 128
_PARAMETERS: tuple[tuple[type, str], ...] = (
    (bool, "bool_param"),
    (int, "int64_param"),
    (float, "double_param"),
    (str, "string_param"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """None leaves a field to the server. See SamplingParams in inference.proto."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json: str | None = None  # a JSON schema that the answer follows; of these five fields one at most
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found one token; natural logarithms."""

    token_id: int
    logprob: float
    rank: int  # 1 = no other token was likelier
    top: tuple[tuple[int, float], ...]  # (token id, logprob), the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """What is new of a function call. ``call_id`` and ``name`` stand in its first piece only."""

    index: int  # of the call in its choice
    call_id: str = ""
    name: str = ""
    arguments: str = ""  # more of the JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new of one choice. Only the last piece of each has a finish_reason, and the very last one the usage."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    usage: Usage | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the second prompt token on; in the first piece
    tool_calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What belongs to a call rather than to sampling. ``timeout_s``: the deadline, which the server honours too."""

    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function call that an earlier answer made."""

    call_id: str
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat. ``role``: system, developer, user, assistant or tool."""

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""  # of the call that a tool message answers
    tool_calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. ``parameters``: the JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = ""


def sampling_of(sampling: Sampling | None, fields: dict[str, Any]) -> Sampling:
    """The one or the other. Raises TypeError where both are given."""
    if sampling is not None and fields:
        raise TypeError(f"give sampling, or single fields ({', '.join(sorted(fields))}), not both")
    return sampling or Sampling(**fields)


def generate_request(
    prompt: str | Sequence[int], sampling: Sampling, options: CallOptions
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=options.model,
        sampling=_params(sampling),
        request_id=options.request_id[:_LARGEST_LABEL],
        cache_salt=options.cache_salt,
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def chat_request(
    messages: Iterable[Message], sampling: Sampling, options: CallOptions, tools: Iterable[Tool], tool_choice: str
) -> inference_pb2.ChatRequest:
    request = inference_pb2.ChatRequest(
        model=options.model,
        messages=[message_proto(message) for message in messages],
        sampling=_params(sampling),
        request_id=options.request_id[:_LARGEST_LABEL],
        cache_salt=options.cache_salt,
        tool_choice=tool_choice,
    )
    for tool in tools:
        request.tools.add(name=tool.name, description=tool.description, parameters_json=tool.parameters)
    return request


def message_proto(message: Message) -> inference_pb2.ChatMessage:
    sent = inference_pb2.ChatMessage(
        role=message.role, content=message.content, name=message.name, tool_call_id=message.tool_call_id
    )
    for call in message.tool_calls:
        sent.tool_calls.add(id=call.call_id, name=call.name, arguments=call.arguments)
    return sent


def tokenize_request(text: str | Iterable[Message]) -> inference_pb2.TokenizeRequest:
    if isinstance(text, str):
        return inference_pb2.TokenizeRequest(text=text)
    return inference_pb2.TokenizeRequest(chat=inference_pb2.Chat(messages=[message_proto(m) for m in text]))


def embed_request(texts: Sequence[str | Sequence[int]], normalize: bool) -> inference_pb2.EmbedRequest:
    """``texts``: all of them text, or all of them token ids."""
    request = inference_pb2.EmbedRequest(normalize=normalize)
    for text in texts:
        if isinstance(text, str):
            request.texts.append(text)
        else:
            request.token_ids.add(ids=text)
    return request


def infer_request(
    texts: Sequence[str], model: str, parameters: Mapping[str, Any]
) -> open_inference_pb2.ModelInferRequest:
    """A request of the Open Inference Protocol. ``parameters``: fields of /v1/completions by name."""
    request = open_inference_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    for name, value in parameters.items():
        kind = next(kind for kinds, kind in _PARAMETERS if isinstance(value, kinds))
        setattr(request.parameters[name], kind, value)
    return request


def infer_texts(reply: open_inference_pb2.ModelInferResponse) -> tuple[str, ...]:
    """What ``text_output`` of a response holds."""
    found = [tensor for tensor in reply.outputs if tensor.name == "text_output"]
    return tuple(item.decode() for tensor in found for item in tensor.contents.bytes_contents)


def _params(sampling: Sampling) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=_structured(sampling),
        n=sampling.n,
    )


def _structured(sampling: Sampling) -> inference_pb2.StructuredOutputs | None:
    asked: dict[str, Any] = {
        "json": sampling.json,
        "json_object": sampling.json_object or None,
        "regex": sampling.regex,
        "choice": inference_pb2.Texts(texts=sampling.choice) if sampling.choice else None,
        "grammar": sampling.grammar,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if len(asked) > 1:
        raise TypeError(f"give one of {', '.join(sorted(asked))}")
    return inference_pb2.StructuredOutputs(**asked) if asked else None


def _logprobs(told: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(x.token_id, x.logprob, x.rank, tuple(zip(x.top_ids, x.top_logprobs, strict=True))) for x in told
    )


def piece_of(message: inference_pb2.GenerateResponse) -> Piece:
    usage = None
    if message.HasField("usage"):
        usage = Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
        )
    return Piece(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=message.finish_reason,
        usage=usage,
        choice=message.choice,
        logprobs=_logprobs(message.logprobs),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        tool_calls=tuple(
            CallPiece(index=x.index, call_id=x.id, name=x.name, arguments=x.arguments) for x in message.tool_calls
        ),
    )
