"""The body of a request, read within bounds and parsed strictly: size, content type, UTF-8, JSON, depth, surrogates.

What Python's parser lets through and JSON does not (NaN, Infinity, one key twice) is refused too.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from services.protocol.errors import ErrorCode, RequestError, invalid

MAX_DEPTH = 64
"""Objects and lists inside one another."""
READ_TIMEOUT_S = 30.0
DRAIN_LIMIT_BYTES = 64 << 20
"""A body too large is read to its end up to here, unseen, so that its client can read the answer."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as an object.

    Raises:
        RequestError: 415, 413 or 400, saying what is wrong with the body.
        starlette.requests.ClientDisconnect: the client left before it had sent everything.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise invalid(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse UTF-8 JSON into an object.

    Raises:
        RequestError: 400; ``param`` names the field where one is at fault.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise invalid(f"the body is not valid UTF-8: byte {exc.start}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as exc:
        raise invalid(f"the body is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}") from None
    except ValueError:  # an integer of more digits than Python reads
        raise invalid("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(raw):
        _check_surrogates(value, "")
    return value


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    kind, _, parameters = content_type.partition(";")
    charset = re.search(r'charset="?([^\s;"]+)', parameters, re.IGNORECASE)
    is_json = kind.strip().lower() == "application/json" or kind.strip().lower().endswith("+json")
    if not is_json or (charset and charset[1].lower() not in ("utf-8", "utf8")):
        raise RequestError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type must be application/json in UTF-8, got {content_type[:100]!r}",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding[:100]!r} is not supported; send it plain"
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    expects = "expect" in request.headers  # such a client waits for our answer before it sends
    if declared.isdigit() and int(declared) > max_bytes and (expects or int(declared) > DRAIN_LIMIT_BYTES):
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    total = 0
    async for piece in request.stream():
        total += len(piece)
        if total <= max_bytes:
            pieces.append(piece)
        elif total > DRAIN_LIMIT_BYTES:
            break
    if total > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(pieces)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        ErrorCode.BODY_TOO_LARGE, f"the body is larger than {max_bytes} bytes (setting router.max_body_bytes)"
    )


def _too_deep() -> RequestError:
    return invalid(f"the body nests deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"the body is not valid JSON: {name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [_printable(key) for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise invalid(f"the key {twice!r} stands twice in one object", twice)
    return data


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _check_surrogates(value: Any, path: str) -> None:
    """Refuse text with half of a surrogate pair: it has no UTF-8. Depth is checked before, so recursion is bounded."""
    if isinstance(value, str) and _LONE_SURROGATE.search(value):
        raise invalid(f"{path} holds a lone surrogate (half of a \\ud83d\\ude00 pair), which is not valid text", path)
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_surrogates(item, f"{path}[{i}]")
    if isinstance(value, dict):
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            if _LONE_SURROGATE.search(key):
                raise invalid("a key holds a lone surrogate, which is not valid text", _printable(where))
            _check_surrogates(item, where)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
