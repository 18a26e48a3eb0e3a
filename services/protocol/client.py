"""A small client of pdray.v1.Inference, for callers with threads and for callers with an event loop.

    with PdrayClient("127.0.0.1:9000") as client:
        for piece in client.generate("Once upon a time", max_tokens=20):
            …piece.text…

Leaving the loop early, or closing the iterator, cancels the call and frees the request on the workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from services.protocol.errors import STATUS, ErrorCode, RequestError
from services.protocol.proto import inference_pb2, inference_pb2_grpc
from services.protocol.status import sent_error

DEFAULT_MAX_MESSAGE_BYTES = 8 << 20
"""As the setting router.max_body_bytes of the server."""
_LARGEST_LABEL = 128


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What belongs to a call rather than to sampling. ``timeout_s``: the deadline, which the server honours too."""

    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None


class PdrayClient:
    """Blocking. One object serves several threads."""

    def __init__(self, address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """``address``: host:port. Connects at the first call."""
        self._channel = grpc.insecure_channel(address, options=channel_options(max_message_bytes))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        options: CallOptions | None = None,
        **fields: Any,
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come. ``fields``: single fields of `Sampling`, in its place.

        Raises:
            RequestError: while iterating; with the server's code, message and advised wait.
        """
        options = options or CallOptions()
        call = self._stub.Generate(_request(prompt, _sampling(sampling, fields), options), timeout=options.timeout_s)
        try:
            for message in call:
                yield _piece(message)
        except grpc.RpcError as exc:
            raise _error(exc) from None
        finally:
            call.cancel()


class AsyncPdrayClient:
    """For one event loop."""

    def __init__(self, address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        """``address``: host:port. Connects at the first call. To be made inside the loop that uses it."""
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        options: CallOptions | None = None,
        **fields: Any,
    ) -> AsyncIterator[Piece]:
        """Pieces of the answer as they come. ``fields``: single fields of `Sampling`, in its place.

        Raises:
            RequestError: while iterating; with the server's code, message and advised wait.
        """
        options = options or CallOptions()
        call = self._stub.Generate(_request(prompt, _sampling(sampling, fields), options), timeout=options.timeout_s)
        try:
            async for message in call:
                yield _piece(message)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc) from None
        finally:
            call.cancel()


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """One size for both directions; calls go straight to the address, past any proxy of the environment."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
    ]


def _sampling(sampling: Sampling | None, fields: dict[str, Any]) -> Sampling:
    if sampling is not None and fields:
        raise TypeError(f"give sampling, or single fields ({', '.join(sorted(fields))}), not both")
    return sampling or Sampling(**fields)


def _request(prompt: str | Sequence[int], sampling: Sampling, options: CallOptions) -> inference_pb2.GenerateRequest:
    params = inference_pb2.SamplingParams(
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
    request = inference_pb2.GenerateRequest(
        model=options.model,
        sampling=params,
        request_id=options.request_id[:_LARGEST_LABEL],
        cache_salt=options.cache_salt,
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


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


def _piece(message: inference_pb2.GenerateResponse) -> Piece:
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
    )


def _error(error: Any) -> RequestError:
    """The server's own code where it sent one, else the one that its gRPC status stands for."""
    if (sent := sent_error(error)) is not None:
        return sent
    status = error.code().name
    by_status = next((code for code, known in STATUS.items() if known.grpc == status), ErrorCode.INTERNAL)
    return RequestError(by_status, error.details() or status)
