"""How a client's channel is set up, and what a call that failed on it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from services.protocol.errors import STATUS, ErrorCode, RequestError
from services.protocol.status import sent_error

DEFAULT_MAX_MESSAGE_BYTES = 8 << 20
"""As the setting router.max_body_bytes of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM. ``ca``: who signed the server's certificate; None: the system's own list. The other two: this client's."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """One size for both directions; calls go straight to the address, past any proxy of the environment."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
    ]


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    """What a secure channel is made with."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


def error_of(error: Any) -> RequestError:
    """The server's own code where it sent one, else the one that its gRPC status stands for."""
    if (sent := sent_error(error)) is not None:
        return sent
    status = error.code().name
    by_status = next((code for code, known in STATUS.items() if known.grpc == status), ErrorCode.INTERNAL)
    return RequestError(by_status, error.details() or status)
