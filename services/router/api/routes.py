"""The routes of this package."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from services.router.api import embed, tokens
from services.router.api.generate import message, respond
from services.router.begin import read_body
from services.router.front import Front
from services.router.live import Live
from services.router.openapi import COUNT_TOKENS, DETOKENIZE, EMBEDDINGS, MESSAGES_API, RESPONSES, SCORE, TOKENIZE

OPENAI, CLAUDE, TOKENS = "OpenAI", "Anthropic", "Tokens"


def add_api_routes(app: FastAPI, front: Front, live: Live) -> None:
    """Add them all."""
    _add_generation(app, front, live)
    _add_tokens(app, front)
    _add_embeddings(app, front, live)


def _add_generation(app: FastAPI, front: Front, live: Live) -> None:
    @app.post("/v1/responses", openapi_extra=RESPONSES, summary="Answer in items; nothing is stored", tags=[OPENAI])
    async def responses(request: Request) -> Response:
        return await respond(front, live, request)

    @app.post("/v1/messages", openapi_extra=MESSAGES_API, summary="Answer a chat in Anthropic's form", tags=[CLAUDE])
    async def messages(request: Request) -> Response:
        return await message(front, live, request)

    @app.post("/v1/messages/count_tokens", openapi_extra=COUNT_TOKENS, summary="Tokens of such a chat", tags=[CLAUDE])
    async def count_tokens(request: Request) -> JSONResponse:
        return JSONResponse(await tokens.count_tokens(front, await read_body(front, request)))


def _add_tokens(app: FastAPI, front: Front) -> None:
    @app.post("/tokenize", openapi_extra=TOKENIZE, summary="Token ids of a prompt or a chat", tags=[TOKENS])
    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse(await tokens.tokenize(front, await read_body(front, request)))

    @app.post("/detokenize", openapi_extra=DETOKENIZE, summary="Text of token ids", tags=[TOKENS])
    async def detokenize(request: Request) -> JSONResponse:
        return JSONResponse(await tokens.detokenize(front, await read_body(front, request)))


def _add_embeddings(app: FastAPI, front: Front, live: Live) -> None:
    @app.post("/v1/embeddings", openapi_extra=EMBEDDINGS, summary="A vector for each text", tags=[OPENAI])
    async def embeddings(request: Request) -> Response:
        return await embed.embeddings(front, live, request)

    @app.post("/v1/score", openapi_extra=SCORE, summary="How alike texts are", tags=[TOKENS])
    @app.post("/score", openapi_extra=SCORE, summary="How alike texts are", tags=[TOKENS])
    async def score(request: Request) -> Response:
        return await embed.score(front, live, request)
