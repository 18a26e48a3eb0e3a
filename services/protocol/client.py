"""A small client of pdray.v1.Inference, for callers with threads and for callers with an event loop.

    with PdrayClient("127.0.0.1:9000") as client:
        for piece in client.generate("Once upon a time", max_tokens=20):
            …piece.text…

Leaving the loop early, or closing the iterator, cancels the call and frees the request on the workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new. Only the last piece has a finish_reason and the usage."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    usage: Usage | None = None


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
    )


def _error(error: Any) -> RequestError:
    """The server's own code where it sent one, else the one that its gRPC status stands for."""
    if (sent := sent_error(error)) is not None:
        return sent
    status = error.code().name
    by_status = next((code for code, known in STATUS.items() if known.grpc == status), ErrorCode.INTERNAL)
    return RequestError(by_status, error.details() or status)
