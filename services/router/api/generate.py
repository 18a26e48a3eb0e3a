"""Endpoints that answer one prompt with one choice, in documents and events of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from services.protocol.errors import RequestError
from services.router.answers import Answer, Delta
from services.router.api.claude_ask import message_ask
from services.router.api.claude_models import MessageWriter
from services.router.api.responses_ask import ResponseAsk, response_ask
from services.router.api.responses_models import ResponseWriter
from services.router.begin import Begun, begin, silence_of, whole_answer
from services.router.front import Front
from services.router.live import Live
from services.router.sse import EventStream, Framing
from services.router.validate import Ask


class Writer(Protocol):
    """Writes one answer, as events or whole; `delta` takes in every delta in both cases."""

    def opening(self, answer: Answer) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def closing(self, answer: Answer) -> bytes: ...
    def failed(self, error: RequestError) -> bytes: ...
    def whole(self, answer: Answer) -> bytes: ...


async def respond(front: Front, live: Live, request: Request) -> Response:
    """POST /v1/responses."""
    begun: Begun[ResponseAsk] = await begin(front, request, response_ask, lambda asked: asked.ask)
    writer = ResponseWriter(begun.request_id, front.model, begun.asked, front.text.names)
    return await _answered(front, live, request, begun, writer, is_stream=begun.asked.ask.stream)


async def message(front: Front, live: Live, request: Request) -> Response:
    """POST /v1/messages."""
    begun: Begun[Ask] = await begin(front, request, message_ask, lambda ask: ask)
    writer = MessageWriter(begun.request_id, front.model)
    return await _answered(front, live, request, begun, writer, is_stream=begun.asked.stream)


async def _answered(
    front: Front, live: Live, request: Request, begun: Begun[Any], writer: Writer, *, is_stream: bool
) -> Response:
    answer = begun.answers[0]
    if not is_stream:
        return await whole_answer(_collected(answer, writer), begun, live, request)
    framing = Framing(end=b"", failed=_failed_after(writer, answer))
    return EventStream(_events(answer, writer), live, begun.headers, begun.end, silence_of(front), framing)


def _failed_after(writer: Writer, answer: Answer) -> Callable[[RequestError], bytes]:
    """A stream may fail after its 200 and before its first event; it is opened then."""

    def failed(error: RequestError) -> bytes:
        opening = b"" if answer.is_begun else writer.opening(answer)
        return opening + writer.failed(error)

    return failed


async def _events(answer: Answer, writer: Writer) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            opening = b"" if answer.is_begun else writer.opening(answer)
            answer.is_begun = True
            out = opening + writer.delta(delta)
            if out:
                yield out
                answer.first_byte()
    yield writer.closing(answer)


async def _collected(answer: Answer, writer: Writer) -> bytes:
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            answer.first_byte()
            writer.delta(delta)
    return writer.whole(answer)
