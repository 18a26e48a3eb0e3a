"""The OpenAI API over HTTP, as one ASGI app: the router's own port serves it, and Ray Serve's proxy does too.

    edge (accept time, ids) ─► body ─► validate ─► front (text) ─► answers ─► stream of events | one JSON document

Errors before the first byte are plain 4xx and 5xx in the OpenAI form; after it they are an error event. A client that
leaves frees its request. There is no CORS, and no page loads anything from another host.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.access.hosts import HostCheck, checks_hosts
from services.router.access.http import AccessMiddleware
from services.router.answers import Answer, Delta, merged
from services.router.api.routes import add_api_routes
from services.router.begin import CLIENT_CLOSED_REQUEST, begin, silence_of, whole_answer
from services.router.debug_routes import add_debug_routes
from services.router.edge import Edge
from services.router.front import Front
from services.router.live import Live
from services.router.logprobs import Told
from services.router.openai_models import ChatShapes, CompletionShapes, Finished, Piece, Shapes, model_json, usage_of
from services.router.openapi import CHAT, COMPLETION
from services.router.problem import error_response
from services.router.sse import EventStream, event
from services.router.types import Core
from services.router.validate import Ask, chat_ask, completion_ask


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
    app.add_middleware(AccessMiddleware, guard=app.state.front.guard)
    if checks_hosts(core.config):
        app.add_middleware(HostCheck, allowed=core.config.access.hosts)
    app.add_middleware(Edge, live=app.state.live, shown=core.request_debug)
    _add_error_handlers(app)
    _add_generation(app, app.state.front, app.state.live)
    add_api_routes(app, app.state.front, app.state.live)
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
    begun = await begin(front, request, endpoint.check, lambda ask: ask)
    ask = begun.asked
    fingerprint = f"pdray-{front.core.card.model_fingerprint[:16]}"
    shapes = endpoint.shapes(
        begun.request_id, front.model, fingerprint, names=front.text.names, usage_null=ask.include_usage
    )
    if ask.stream:
        events = _events(begun.answers, shapes, with_usage=ask.include_usage)
        return EventStream(events, live, begun.headers, begun.end, silence_of(front))
    return await whole_answer(_collect(begun.answers, shapes), begun, live, request)


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
    with_ids = answer.with_token_ids
    piece = Piece(
        text=answer.echoed + delta.text if is_first else delta.text,
        told=answer.told_prompt() + delta.told if is_first else delta.told,
        start=len(answer.echoed),
        calls=delta.calls,
        token_ids=delta.token_ids if with_ids else None,
        prompt_ids=answer.request.prompt_ids if with_ids and is_first else None,
    )
    if not piece.is_text_only:
        pieces.append(shapes.piece(index, piece))
    elif piece.text:
        pieces.append(shapes.text(index, piece.text))
    if delta.finish_reason:
        pieces.append(shapes.end(index, delta.finish_reason))
    return pieces


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
            for call in delta.calls:
                choice.add_call(call)
            if choice.token_ids is not None:
                choice.token_ids += delta.token_ids
            choice.reason = delta.finish_reason or choice.reason
            if answer.request.sampling.shaping.prompt_logprobs is not None:
                choice.prompt_logprobs = answer.prompt_logprobs
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return shapes.whole(choices, usage_of(answers))


def _begun(answer: Answer) -> Finished:
    told: list[Told] | None = None if answer.request.sampling.shaping.logprobs is None else []
    return Finished(
        text=answer.echoed,
        told=told,
        start=len(answer.echoed),
        token_ids=[] if answer.with_token_ids else None,
        prompt_ids=answer.request.prompt_ids,
    )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, exc: RequestError) -> Response:
        return error_response(exc, request.url.path)

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
        response = error_response(error, request.url.path)
        response.headers.update(exc.headers or {})
        return response
