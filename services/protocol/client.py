"""A small client of all that the router serves over gRPC, for callers with threads and for callers with an event loop.

    with PdrayClient("127.0.0.1:9000", api_key="…") as client:
        for piece in client.generate("Once upon a time", max_tokens=20):
            …piece.text…

Leaving the loop early, or closing the iterator, cancels the call and frees the request on the workers. Every method of
the asynchronous client has the name, the arguments and the errors of the blocking one's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.protocol.channels import DEFAULT_MAX_MESSAGE_BYTES, credentials, error_of
from services.protocol.channels import Tls as Tls
from services.protocol.channels import channel_options as channel_options
from services.protocol.client_messages import Call as Call
from services.protocol.client_messages import CallOptions as CallOptions
from services.protocol.client_messages import CallPiece as CallPiece
from services.protocol.client_messages import Message as Message
from services.protocol.client_messages import Piece as Piece
from services.protocol.client_messages import Sampling as Sampling
from services.protocol.client_messages import TokenLogprobs as TokenLogprobs
from services.protocol.client_messages import Tool as Tool
from services.protocol.client_messages import Usage as Usage
from services.protocol.client_messages import (
    chat_request,
    embed_request,
    generate_request,
    infer_request,
    infer_texts,
    piece_of,
    sampling_of,
    tokenize_request,
)
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import inference_pb2, inference_pb2_grpc, open_inference_pb2_grpc


class _Client:
    """What both clients share: the connection's settings, and one stub for each service."""

    def __init__(self, channel: Any, api_key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self._open = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(channel)

    def _begin(self, rpc: Callable[..., Any], request: Any, options: CallOptions | None = None) -> Any:
        return rpc(request, timeout=None if options is None else options.timeout_s, metadata=self._metadata)


class PdrayClient(_Client):
    """Blocking. One object serves several threads."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """``address``: host:port. Connects at the first call."""
        options = channel_options(max_message_bytes)
        if tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            channel = grpc.secure_channel(address, credentials(tls), options=options)
        super().__init__(channel, api_key)

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
        request = generate_request(prompt, sampling_of(sampling, fields), options or CallOptions())
        call = self._begin(self._stub.Generate, request, options)
        try:
            for message in call:
                yield piece_of(message)
        except grpc.RpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    def chat(
        self,
        messages: Iterable[Message],
        sampling: Sampling | None = None,
        options: CallOptions | None = None,
        *,
        tools: Iterable[Tool] = (),
        tool_choice: str = "",
        **fields: Any,
    ) -> Iterator[Piece]:
        """Likewise the answer to a chat. ``tool_choice``: none, auto, required or a tool's name."""
        request = chat_request(messages, sampling_of(sampling, fields), options or CallOptions(), tools, tool_choice)
        call = self._begin(self._stub.Chat, request, options)
        try:
            for message in call:
                yield piece_of(message)
        except grpc.RpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    def embed(self, texts: Sequence[str | Sequence[int]], *, normalize: bool = True) -> tuple[tuple[float, ...], ...]:
        """One vector for each text, or list of token ids, in order. Raises RequestError."""
        reply = self._ask(self._stub.Embed, embed_request(texts, normalize))
        return tuple(tuple(vector.values) for vector in reply.embeddings)

    def tokenize(self, text: str | Iterable[Message]) -> tuple[int, ...]:
        """Ids of a text or of a chat. Raises RequestError."""
        reply = self._ask(self._stub.Tokenize, tokenize_request(text))
        return tuple(reply.token_ids)

    def model(self) -> inference_pb2.Model:
        """What is served. Raises RequestError."""
        model: inference_pb2.Model = self._ask(self._stub.GetModel, inference_pb2.GetModelRequest())
        return model

    def load(self) -> inference_pb2.Load:
        """Requests of this router, and its workers. Raises RequestError."""
        load: inference_pb2.Load = self._ask(self._stub.GetLoad, inference_pb2.GetLoadRequest())
        return load

    def abort(self, request_id: str) -> int:
        """End running requests by their id or label; how many there were. Raises RequestError."""
        reply = self._ask(self._stub.Abort, inference_pb2.AbortRequest(request_id=request_id))
        return int(reply.aborted)

    def is_healthy(self, service: str = "") -> bool:
        """Whether grpc.health.v1 says SERVING. Raises RequestError."""
        reply = self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def infer(self, texts: Sequence[str], model: str = "", **parameters: Any) -> tuple[str, ...]:
        """Whole answers by the Open Inference Protocol. ``parameters``: as of /v1/completions. Raises RequestError."""
        return infer_texts(self._ask(self._open.ModelInfer, infer_request(texts, model, parameters)))

    def infer_stream(self, texts: Sequence[str], model: str = "", **parameters: Any) -> Iterator[str]:
        """Likewise pieces of text of all choices as they come."""
        call = self._begin(self._open.ModelStreamInfer, iter([infer_request(texts, model, parameters)]))
        try:
            for reply in call:
                yield from _stream_texts(reply)
        except grpc.RpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    def _ask(self, rpc: Callable[..., Any], request: Any) -> Any:
        try:
            return self._begin(rpc, request)
        except grpc.RpcError as exc:
            raise error_of(exc) from None


class AsyncPdrayClient(_Client):
    """For one event loop."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """``address``: host:port. Connects at the first call. To be made inside the loop that uses it."""
        options = channel_options(max_message_bytes)
        if tls is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            channel = grpc.aio.secure_channel(address, credentials(tls), options=options)
        super().__init__(channel, api_key)

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
        request = generate_request(prompt, sampling_of(sampling, fields), options or CallOptions())
        call = self._begin(self._stub.Generate, request, options)
        try:
            async for message in call:
                yield piece_of(message)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    async def chat(
        self,
        messages: Iterable[Message],
        sampling: Sampling | None = None,
        options: CallOptions | None = None,
        *,
        tools: Iterable[Tool] = (),
        tool_choice: str = "",
        **fields: Any,
    ) -> AsyncIterator[Piece]:
        request = chat_request(messages, sampling_of(sampling, fields), options or CallOptions(), tools, tool_choice)
        call = self._begin(self._stub.Chat, request, options)
        try:
            async for message in call:
                yield piece_of(message)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    async def embed(
        self, texts: Sequence[str | Sequence[int]], *, normalize: bool = True
    ) -> tuple[tuple[float, ...], ...]:
        reply = await self._ask(self._stub.Embed, embed_request(texts, normalize))
        return tuple(tuple(vector.values) for vector in reply.embeddings)

    async def tokenize(self, text: str | Iterable[Message]) -> tuple[int, ...]:
        reply = await self._ask(self._stub.Tokenize, tokenize_request(text))
        return tuple(reply.token_ids)

    async def model(self) -> inference_pb2.Model:
        model: inference_pb2.Model = await self._ask(self._stub.GetModel, inference_pb2.GetModelRequest())
        return model

    async def load(self) -> inference_pb2.Load:
        load: inference_pb2.Load = await self._ask(self._stub.GetLoad, inference_pb2.GetLoadRequest())
        return load

    async def abort(self, request_id: str) -> int:
        reply = await self._ask(self._stub.Abort, inference_pb2.AbortRequest(request_id=request_id))
        return int(reply.aborted)

    async def is_healthy(self, service: str = "") -> bool:
        reply = await self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def infer(self, texts: Sequence[str], model: str = "", **parameters: Any) -> tuple[str, ...]:
        return infer_texts(await self._ask(self._open.ModelInfer, infer_request(texts, model, parameters)))

    async def infer_stream(self, texts: Sequence[str], model: str = "", **parameters: Any) -> AsyncIterator[str]:
        call = self._begin(self._open.ModelStreamInfer, iter([infer_request(texts, model, parameters)]))
        try:
            async for reply in call:
                for text in _stream_texts(reply):
                    yield text
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from None
        finally:
            call.cancel()

    async def _ask(self, rpc: Callable[..., Any], request: Any) -> Any:
        try:
            return await self._begin(rpc, request)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from None


def _stream_texts(reply: Any) -> tuple[str, ...]:
    if reply.error_message:
        code, _, message = reply.error_message.partition(": ")
        raise RequestError(ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL, message)
    return infer_texts(reply.infer_response)
