"""Who may call a worker: every call carries a time-bound HMAC, every registration is signed; the secret is never sent.

The MAC covers the full method name, the time and a nonce. A captured header is good for ``WINDOW_S`` and one method.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from services.protocol.proto import worker_pb2

HEADER = "pdray-auth"
WINDOW_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, whatever others wait for there
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


def _mac(secret: str, *parts: str) -> str:
    body = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
    return hmac.new(secret.encode(), body, "sha256").hexdigest()


def sign_call(secret: str, method: str, now_s: float) -> str:
    """Header value for one call of ``method`` (``/package.Service/Method``)."""
    stamp, nonce = str(int(now_s * 1000)), secrets.token_hex(8)
    return f"{stamp}.{nonce}.{_mac(secret, 'call', method, stamp, nonce)}"


def verify_call(secret: str, method: str, value: str, now_s: float) -> bool:
    """True for a header that `sign_call` made with the same secret, for this method, within ``WINDOW_S``."""
    parts = value.split(".")
    if len(parts) != 3 or len(parts[0]) > 16 or not parts[0].isdecimal():
        return False
    stamp, nonce, mac = parts
    fresh = abs(now_s - int(stamp) / 1000) <= WINDOW_S
    return hmac.compare_digest(mac, _mac(secret, "call", method, stamp, nonce)) and fresh


def sign_registration(registration: worker_pb2.Registration, secret: str) -> None:
    """Set the signature over every other field."""
    registration.signature = _registration_mac(registration, secret)


def verify_registration(registration: worker_pb2.Registration, secret: str) -> bool:
    return hmac.compare_digest(registration.signature, _registration_mac(registration, secret))


def _registration_mac(registration: worker_pb2.Registration, secret: str) -> bytes:
    unsigned = worker_pb2.Registration()
    unsigned.CopyFrom(registration)
    unsigned.ClearField("signature")
    body = b"registration" + unsigned.SerializeToString(deterministic=True)
    return hmac.new(secret.encode(), body, "sha256").digest()


class CallAuth(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every call without a valid header, before its handler sees a byte."""

    def __init__(self, secret: str, wall_clock: Callable[[], float] = time.time) -> None:
        if not secret:
            raise ValueError("secret must not be empty: workers refuse unsigned calls")
        self._secret = secret
        self._clock = wall_clock

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        values = [v for k, v in details.invocation_metadata or () if k == HEADER]
        value = values[0] if values and isinstance(values[0], str) else ""
        if handler is None or verify_call(self._secret, details.method, value, self._clock()):
            return handler
        return _rejecting(handler)


def _rejecting(handler: Any) -> Any:
    message = "the call is not signed with this application's secret (config: secret), or clocks differ by over 30 s"

    async def unary(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    async def stream(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        yield  # a generator, as the method's shape demands

    make: Any = {
        (False, False): partial(grpc.unary_unary_rpc_method_handler, unary),
        (True, False): partial(grpc.stream_unary_rpc_method_handler, unary),
        (False, True): partial(grpc.unary_stream_rpc_method_handler, stream),
        (True, True): partial(grpc.stream_stream_rpc_method_handler, stream),
    }[(handler.request_streaming, handler.response_streaming)]
    return make()


class _SignUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_signed(details, self._secret), request)


class _SignStream(grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await continuation(_signed(details, self._secret), requests)


def _signed(details: Any, secret: str) -> Any:
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    metadata = list(details.metadata or ())
    metadata.append((HEADER, sign_call(secret, method, time.time())))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, grpc.aio.Metadata(*metadata), details.credentials, details.wait_for_ready
    )


def channel(address: str, secret: str) -> grpc.aio.Channel:
    """A channel to a worker that signs each call. The caller closes it."""
    interceptors: list[Any] = [_SignUnary(secret), _SignStream(secret)]
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)
