"""The start that all generating endpoints share: body, limits, fields, text; and what their answers have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.protocol.errors import RequestError
from services.router.answers import Answer
from services.router.body import read_json_object
from services.router.edge import ARRIVAL
from services.router.front import Arrival, Front, outcome_of
from services.router.live import ClientGone, Live
from services.router.sse import Silence
from services.router.validate import Ask

IGNORED_HEADER = "x-pdray-ignored"
CLIENT_CLOSED_REQUEST = 499  # for the log; nobody reads it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun(Generic[T]):
    """An accepted request. ``asked``: as its endpoint read it."""

    request_id: str
    asked: T
    answers: Sequence[Answer]
    headers: Mapping[str, str]

    def end(self, error: RequestError | None) -> None:
        """Close the answers; to be called when the last byte is out."""
        for answer in self.answers:
            if error is not None:
                answer.fail(str(error.code))
            answer.close()


async def begin(
    front: Front, request: Request, read: Callable[[Mapping[str, Any], str, int], T], ask_of: Callable[[T], Ask]
) -> Begun[T]:
    """Read and check the body by ``read`` (body, model, size of the vocabulary), and tokenize; nothing is computed yet.

    Raises:
        RequestError: before anything was sent.
        starlette.requests.ClientDisconnect: the client left before it had sent everything.
    """
    arrival: Arrival = request.scope[ARRIVAL]
    timeline = front.open(arrival)
    try:
        body = await read_body(front, request)
        asked = read(body, front.model, front.text.vocab_size)
        ask = ask_of(asked)
        answers = await front.answers(ask, arrival, timeline)
    except (RequestError, ClientDisconnect, asyncio.CancelledError) as exc:
        timeline.close(outcome_of(exc))
        raise
    return Begun(arrival.request_id, asked, answers, ignored_header(ask.ignored))


async def whole_answer(work: Coroutine[Any, Any, bytes], begun: Begun[Any], live: Live, request: Request) -> Response:
    """The JSON document that ``work`` makes of the answers, which are closed then. Raises RequestError."""
    error: RequestError | None = None
    try:
        body = await live.run(work, request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except RequestError as exc:
        error = exc
        raise
    finally:
        begun.end(error)
    return Response(body, media_type="application/json", headers=dict(begun.headers))


async def read_body(front: Front, request: Request) -> dict[str, Any]:
    """The body, within config.limits. Raises as `begin` does."""
    body = await read_json_object(request, front.core.config.router.max_body_bytes)
    front.check_limits(body)
    return body


def silence_of(front: Front) -> Silence:
    """The settings of streams."""
    router = front.core.config.router
    return Silence(first_wait_s=router.first_wait_s, ping_s=router.ping_s)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names of unknown fields as a header's value: printable ASCII, at most some of them."""
    if not names:
        return {}
    shown = [name[:64].encode("ascii", "replace").decode() for name in names[:20]]
    return {IGNORED_HEADER: ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in shown)}
