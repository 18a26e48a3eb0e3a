"""The OpenAI API over HTTP, as one ASGI app: the router's own port serves it, and Ray Serve's proxy does too.

    edge (accept time, ids) ─► body ─► validate ─► front (text) ─► answers ─► stream of events | one JSON document

Errors before the first byte are plain 4xx and 5xx in the OpenAI form; after it they are an error event. A client that
leaves frees its request. There is no CORS, and no page loads anything from another host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.answers import Answer, Delta, merged
from services.router.body import read_json_object
from services.router.debug_routes import add_debug_routes
from services.router.edge import ARRIVAL, Edge
from services.router.front import Arrival, Front, outcome_of
from services.router.live import ClientGone, Live
from services.router.logprobs import Told
from services.router.openai_models import ChatShapes, CompletionShapes, Finished, Shapes, model_json, usage_of
from services.router.openapi import CHAT, COMPLETION
from services.router.problem import error_response
from services.router.sse import EventStream, event
from services.router.types import Core
from services.router.validate import Ask, chat_ask, completion_ask

IGNORED_HEADER = "x-pdray-ignored"
CLIENT_CLOSED_REQUEST = 499  # for the log; nobody reads it


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What tells the two generating endpoints apart."""

    check: Callable[[Mapping[str, Any], str, int], Ask]
    shapes: Callable[..., Shapes]


CHAT_ENDPOINT = Endpoint(chat_ask, ChatShapes)
COMPLETION_ENDPOINT = Endpoint(completion_ask, CompletionShapes)


def build_http_app(core: Core, front: Front | None = None) -> FastAPI:
    """The app; ``app.state.live`` knows the open requests. ``front`` is shared with gRPC where both run.

    Raises:
        ConfigError: the prepared model's tokenizer or template is unusable.
    """
    app = FastAPI(
        title="pdray",
        version="1",
        description="OpenAI-compatible API. `/docs` is this document as a page.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.front = front or Front(core)
    app.state.live = Live()
    app.add_middleware(Edge, live=app.state.live)
    _add_error_handlers(app)
    _add_generation(app, app.state.front, app.state.live)
    _add_models(app, app.state.front)
    add_debug_routes(app, core)
    return app


def _add_generation(app: FastAPI, front: Front, live: Live) -> None:
    @app.post("/v1/chat/completions", openapi_extra=CHAT, summary="Answer a chat", tags=["OpenAI"])
    async def chat_completions(request: Request) -> Response:
        return await _generate(front, live, request, CHAT_ENDPOINT)

    @app.post("/v1/completions", openapi_extra=COMPLETION, summary="Continue a text", tags=["OpenAI"])
    async def completions(request: Request) -> Response:
        return await _generate(front, live, request, COMPLETION_ENDPOINT)


def _add_models(app: FastAPI, front: Front) -> None:
    created = int(front.core.card.tokenizer_path.stat().st_mtime)
    entry = model_json(front.model, created, front.text.context)

    @app.get("/v1/models", summary="The model that is served", tags=["OpenAI"])
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/v1/models/{model:path}", summary="One model", tags=["OpenAI"])
    async def model(model: str) -> JSONResponse:
        if model != front.model:
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"The model {model[:100]!r} does not exist here; this server has {front.model!r}",
                param="model",
            )
        return JSONResponse(entry)


async def _generate(front: Front, live: Live, request: Request, endpoint: Endpoint) -> Response:
    arrival: Arrival = request.scope[ARRIVAL]
    timeline = front.open(arrival)
    try:
        body = await read_json_object(request, front.core.config.router.max_body_bytes)
        ask = endpoint.check(body, front.model, front.text.vocab_size)
        answers = await front.answers(ask, arrival, timeline)
    except (RequestError, ClientDisconnect, asyncio.CancelledError) as exc:
        timeline.close(outcome_of(exc))
        raise
    fingerprint = f"pdray-{front.core.card.model_fingerprint[:16]}"
    shapes = endpoint.shapes(
        arrival.request_id, front.model, fingerprint, names=front.text.names, usage_null=ask.include_usage
    )
    headers = {IGNORED_HEADER: _header_list(ask.ignored)} if ask.ignored else {}
    if ask.stream:
        events = _events(answers, shapes, with_usage=ask.include_usage)
        return EventStream(events, live, headers, partial(_end, answers))
    return await _whole(answers, shapes, live, request, headers)


async def _events(answers: Sequence[Answer], shapes: Shapes, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    """Events as they come; each yield returns once the bytes are with the socket."""
    begun: set[int] = set()
    async with aclosing(merged(answers)) as deltas:
        async for answer, delta in deltas:
            index = answer.index_of(delta)
            out = _pieces(shapes, index, answer, delta, is_first=index not in begun)
            if out:
                yield b"".join(event(piece) for piece in out)
                begun.add(index)
                answer.first_byte()
    if with_usage:
        yield event(shapes.usage(usage_of(answers)))


def _pieces(shapes: Shapes, index: int, answer: Answer, delta: Delta, *, is_first: bool) -> list[bytes]:
    opening = shapes.first(index) if is_first else None
    pieces = [] if opening is None else [opening]
    text = answer.echoed + delta.text if is_first else delta.text
    told = answer.told_prompt() + delta.told if is_first else delta.told
    if told:
        pieces.append(shapes.told(index, text, told, len(answer.echoed)))
    elif text:
        pieces.append(shapes.text(index, text))
    if delta.finish_reason:
        pieces.append(shapes.end(index, delta.finish_reason))
    return pieces


async def _whole(
    answers: Sequence[Answer], shapes: Shapes, live: Live, request: Request, headers: Mapping[str, str]
) -> Response:
    error: RequestError | None = None
    try:
        body = await live.run(_collect(answers, shapes), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except RequestError as exc:
        error = exc
        raise
    finally:
        _end(answers, error)
    return Response(body, media_type="application/json", headers=dict(headers))


async def _collect(answers: Sequence[Answer], shapes: Shapes) -> bytes:
    choices = [_begun(answer) for answer in answers for _ in range(answer.num_choices)]
    texts = [[choice.text] for choice in choices]
    async with aclosing(merged(answers)) as deltas:
        async for answer, delta in deltas:
            answer.first_byte()
            index = answer.index_of(delta)
            choice = choices[index]
            if choice.told is not None:
                choice.told += delta.told if len(texts[index]) > 1 else (*answer.told_prompt(), *delta.told)
            texts[index].append(delta.text)
            choice.reason = delta.finish_reason or choice.reason
            if answer.request.sampling.shaping.prompt_logprobs is not None:
                choice.prompt_logprobs = answer.prompt_logprobs
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return shapes.whole(choices, usage_of(answers))


def _begun(answer: Answer) -> Finished:
    told: list[Told] | None = None if answer.request.sampling.shaping.logprobs is None else []
    return Finished(text=answer.echoed, told=told, start=len(answer.echoed))


def _end(answers: Sequence[Answer], error: RequestError | None) -> None:
    for answer in answers:
        if error is not None:
            answer.fail(str(error.code))
        answer.close()


def _header_list(names: Sequence[str]) -> str:
    """Names of unknown fields as a header's value: printable ASCII, at most some of them."""
    shown = [name[:64].encode("ascii", "replace").decode() for name in names[:20]]
    return ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in shown)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_request: Request, exc: RequestError) -> Response:
        return error_response(exc)

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _exc: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, exc: RequestValidationError) -> Response:
        return error_response(invalid(f"the request is malformed: {exc.errors()[0].get('msg', '')}"))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, exc: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        if exc.status_code == 405:
            error = RequestError(ErrorCode.METHOD_NOT_ALLOWED, f"There is no {where}: another method may be meant")
        elif exc.status_code == 404:
            error = RequestError(ErrorCode.NOT_FOUND, f"There is no {where}; see /docs")
        else:
            error = invalid(str(exc.detail))
        response = error_response(error)
        response.headers.update(exc.headers or {})
        return response
