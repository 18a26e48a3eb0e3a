"""The router's own gRPC server: what it serves, under which options, and over which wire."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import ConfigError
from services.config import ServeConfig, TlsConfig
from services.protocol.client import channel_options
from services.protocol.proto import inference_pb2_grpc, open_inference_pb2_grpc
from services.router.access.rpc import AccessInterceptor
from services.router.front import Front
from services.router.grpc_front import InferenceServicer
from services.router.grpc_health import INFERENCE, OPEN_INFERENCE, HealthServicer
from services.router.grpc_open_inference import OpenInferenceServicer
from services.router.grpc_reading import ReadingInterceptor

MIN_PING_MS = 1_000
SERVICES = (INFERENCE, OPEN_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
"""What reflection tells of."""


@dataclass(frozen=True, slots=True)
class Servicers:
    """All of them; they can be served elsewhere too (Ray Serve's gRPC proxy)."""

    inference: InferenceServicer
    open_inference: OpenInferenceServicer
    health: HealthServicer

    @classmethod
    def of(cls, front: Front) -> Servicers:
        return cls(InferenceServicer(front), OpenInferenceServicer(front), HealthServicer(front.core))


async def start_grpc(config: ServeConfig, front: Front, servicers: Servicers) -> tuple[grpc.aio.Server, int]:
    """A serving server and its port, which must have been found free.

    Raises:
        ConfigError: the port cannot be bound, or a TLS file cannot be used.
    """
    router = config.router
    server = grpc.aio.server(
        options=_server_options(router.max_body_bytes),
        interceptors=[AccessInterceptor(front.guard), ReadingInterceptor()],
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(servicers.inference, server)  # type: ignore[no-untyped-call]
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        servicers.open_inference, server
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicers.health, server)
    reflection.enable_server_reflection(SERVICES, server)
    host = f"[{router.host}]" if ":" in router.host else router.host
    place = f"{host}:{router.grpc_port}"
    try:
        credentials = server_credentials(config.tls)
        port = server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
    except RuntimeError as exc:
        await server.stop(None)
        raise ConfigError(f"router.grpc_port: cannot listen on {place}: {exc}") from None
    await server.start()
    return server, int(port)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """What the server proves itself with; None for plain gRPC. Raises ConfigError for a file that cannot be read."""
    if not tls.is_on:
        return None
    pair = (_read(tls.key_file, "tls.key_file"), _read(tls.cert_file, "tls.cert_file"))
    client_ca = _read(tls.client_ca_file, "tls.client_ca_file") if tls.client_ca_file else None
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{setting}: {path} cannot be read: {exc.strerror}") from None


def _server_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        *channel_options(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]
