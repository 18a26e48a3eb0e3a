"""A streamed answer as server-sent events: the status waits for the first event, comments fill a long silence.

    waiting ──first event──► started ──► … ──► done          200 with the first event
       │  └──first_wait_s──► started (ping)                   200 and a comment; an error after it is an error event
       └──RequestError──► a plain 4xx or 5xx

A stream that fails after its start ends with an error event and then [DONE], or as its own API ends one (`Framing`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.protocol.errors import ErrorCode, RequestError
from services.router.live import ClientGone, Live
from services.router.problem import error_response

SEND_LIMIT_S = 60.0
"""A client that takes no bytes for so long is dropped."""
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_log = logging.getLogger("pdray.router")


def event(data: bytes) -> bytes:
    """One message of JSON without line breaks."""
    return b"data: " + data + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """What a stream ends with when it fails after its start."""
    return event(json.dumps(error.body(), ensure_ascii=False).encode()) + DONE


@dataclass(frozen=True, slots=True)
class Framing:
    """How one API ends its streams. ``failed``: the bytes of an error after the start."""

    end: bytes = DONE
    failed: Callable[[RequestError], bytes] = error_event


OPENAI = Framing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How long a stream may be silent; see config.router."""

    first_wait_s: float
    ping_s: float


class Sink:
    """The connection's sending half: starts the answer late, and knows when something was sent last."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str], framing: Framing
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._framing = framing
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self._lock = asyncio.Lock()
        self.is_started = False
        self.last_s = time.monotonic()

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send bytes, after the 200 and its headers if these are not out yet.

        Raises:
            ClientGone: the client took nothing for SEND_LIMIT_S.
        """
        try:
            async with asyncio.timeout(SEND_LIMIT_S), self._lock:
                if not self.is_started:
                    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
                    await self._send({"type": "http.response.start", "status": 200, "headers": raw})
                    self.is_started = True
                await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError:
            raise ClientGone from None
        self.last_s = time.monotonic()

    async def fail(self, error: RequestError) -> None:
        """End the answer with an error: as a status while nothing is out, as an event after that."""
        if self.is_started:
            await self.write(self._framing.failed(error), is_last=True)
        else:
            await error_response(error, self._scope["path"])(self._scope, self._receive, self._send)


class EventStream(Response):
    """Sends what ``events`` yields; closes the generator and calls ``on_end``, whatever happens.

    An error that ``events`` raises should be a RequestError; anything else is logged and shown as an internal error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        live: Live,
        headers: Mapping[str, str],
        on_end: Callable[[RequestError | None], None],
        silence: Silence,
        framing: Framing = OPENAI,
    ) -> None:
        super().__init__()
        self._events = events
        self._live = live
        self._extra_headers = headers
        self._on_end = on_end
        self._silence = silence
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = Sink(scope, receive, send, self._extra_headers, self._framing)
        error: RequestError | None = None
        try:
            await self._live.run(self._pump(sink), receive, lambda: self._tick(sink))
        except RequestError as exc:
            error = exc
            await sink.fail(exc)
        except ClientGone:
            return
        finally:
            await self._events.aclose()
            self._on_end(error)

    async def _pump(self, sink: Sink) -> None:
        try:
            async with aclosing(self._events) as events:
                async for piece in events:
                    await sink.write(piece)
            await sink.write(self._framing.end, is_last=True)
        except (RequestError, ClientGone):
            raise
        except Exception:  # the edge of the process: the client gets an error, the log the reason
            _log.exception("a stream failed")
            raise RequestError(ErrorCode.INTERNAL, "the router failed to answer; see its log") from None

    async def _tick(self, sink: Sink) -> float:
        """Ping where nothing was sent for too long; the seconds until the next look."""
        limit_s = self._silence.ping_s if sink.is_started else self._silence.first_wait_s
        left_s = sink.last_s + limit_s - time.monotonic()
        if left_s > 0:
            return left_s
        await sink.write(PING)
        return self._silence.ping_s
