"""Errors as HTTP answers: in the OpenAI form {"error": {message, type, param, code}}, on Anthropic's routes in its."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from services.protocol.errors import RequestError

CLAUDE_PATH = "/v1/messages"
_CLAUDE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_response(error: RequestError, path: str = "") -> JSONResponse:
    """The status, body and Retry-After of an error. ``path``: of the request, which tells the form."""
    body = claude_error(error) if path.endswith((CLAUDE_PATH, f"{CLAUDE_PATH}/count_tokens")) else error.body()
    return JSONResponse(body, error.status.http, headers=retry_headers(error))


def claude_error(error: RequestError) -> dict[str, Any]:
    """Anthropic's form of an error; what it has no word for is an invalid request."""
    kind = _CLAUDE_TYPES.get(error.status.http, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def retry_headers(error: RequestError) -> dict[str, str]:
    """Retry-After in whole seconds, and in ms for clients that read it; empty where a retry is not advised."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
    }
