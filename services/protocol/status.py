"""How a RequestError crosses a gRPC call: its status, and in trailing metadata its code and the wait it advises."""

from __future__ import annotations

import math
from typing import Any

from services.protocol.errors import ErrorCode, RequestError

CODE_KEY = "pdray-error-code"
"""Trailing metadata: the `ErrorCode`."""
RETRY_KEY = "retry-after-ms"
"""Trailing metadata: how long to wait before another try."""


def trailing_of(error: RequestError) -> list[tuple[str, str]]:
    """Trailing metadata for a call that ends with this error."""
    metadata = [(CODE_KEY, str(error.code))]
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    return metadata


def sent_error(failed: Any) -> RequestError | None:
    """The RequestError that the other side ended the call with; None where it named none (a broken connection, say).

    Args:
        failed: a grpc.RpcError of either API. A code of a newer version counts as INTERNAL.
    """
    trailing = {str(key): value for key, value in failed.trailing_metadata() or ()}
    code = trailing.get(CODE_KEY)
    if code is None:
        return None
    known = ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL
    wait_ms = trailing.get(RETRY_KEY, "")
    wait_s = int(wait_ms) / 1000 if str(wait_ms).isdecimal() else None
    return RequestError(known, failed.details() or str(code), retry_after_s=wait_s)
