"""Errors as HTTP answers in the OpenAI form: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math

from starlette.responses import JSONResponse

from services.protocol.errors import RequestError


def error_response(error: RequestError) -> JSONResponse:
    """The status, body and Retry-After of an error."""
    return JSONResponse(error.body(), error.status.http, headers=retry_headers(error))


def retry_headers(error: RequestError) -> dict[str, str]:
    """Retry-After in whole seconds, and in ms for clients that read it; empty where a retry is not advised."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
    }
