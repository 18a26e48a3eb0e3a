"""Errors that reach a client, and the one map from them to HTTP and gRPC statuses.

A message says what happened, the numbers, and the setting that helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """What went wrong, in the words of the OpenAI API where it has one."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    BODY_TOO_LARGE = "body_too_large"
    UNAUTHENTICATED = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    RATE_LIMITED = "rate_limit_exceeded"
    NOT_YET_SUPPORTED = "not_yet_supported"
    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    INCOMPATIBLE_WORKERS = "incompatible_workers"
    NEVER_FITS = "exceeds_kv_capacity"
    TRANSFER_FAILED = "transfer_failed"
    WORKER_LOST = "worker_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    STALE = "stale_attempt"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Status:
    """How one error code looks on each wire."""

    http: int
    grpc: str  # name of a grpc.StatusCode
    type: str  # the OpenAI error type
    retryable: bool = False  # by the router, on other workers


STATUS: dict[ErrorCode, Status] = {
    ErrorCode.INVALID_REQUEST: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorCode.NOT_YET_SUPPORTED: Status(400, "UNIMPLEMENTED", "invalid_request_error"),
    ErrorCode.NEVER_FITS: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorCode.MODEL_NOT_FOUND: Status(404, "NOT_FOUND", "invalid_request_error"),
    ErrorCode.NOT_FOUND: Status(404, "NOT_FOUND", "invalid_request_error"),
    ErrorCode.METHOD_NOT_ALLOWED: Status(405, "UNIMPLEMENTED", "invalid_request_error"),
    ErrorCode.BODY_TOO_LARGE: Status(413, "RESOURCE_EXHAUSTED", "invalid_request_error"),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: Status(415, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorCode.UNAUTHENTICATED: Status(401, "UNAUTHENTICATED", "authentication_error"),
    ErrorCode.PERMISSION_DENIED: Status(403, "PERMISSION_DENIED", "permission_error"),
    ErrorCode.RATE_LIMITED: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    ErrorCode.OVERLOADED: Status(503, "RESOURCE_EXHAUSTED", "overloaded_error", retryable=True),
    ErrorCode.NO_WORKERS: Status(503, "UNAVAILABLE", "overloaded_error"),
    ErrorCode.INCOMPATIBLE_WORKERS: Status(503, "FAILED_PRECONDITION", "server_error"),
    ErrorCode.TRANSFER_FAILED: Status(503, "ABORTED", "server_error", retryable=True),
    ErrorCode.WORKER_LOST: Status(503, "UNAVAILABLE", "server_error", retryable=True),
    ErrorCode.DEADLINE_EXCEEDED: Status(504, "DEADLINE_EXCEEDED", "server_error"),
    ErrorCode.CANCELLED: Status(499, "CANCELLED", "server_error"),
    ErrorCode.STALE: Status(409, "ABORTED", "server_error"),
    ErrorCode.INTERNAL: Status(500, "INTERNAL", "server_error"),
}


class RequestError(Exception):
    """A request that ends with an error. `param` names the field of the request at fault, where one is."""

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> Status:
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.status.type,
                "param": self.param,
                "code": str(self.code),
            }
        }


def invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, param=param)
