"""Routes for people and for probes: pages, health, metrics, the cluster, and what happened to a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response, StreamingResponse

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.page import Page
from services.router.record import MAX_LISTENERS
from services.router.types import Core
from services.router.view import RETRY_AFTER_S

MAX_TRACE_S = 86_400
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-")
"""What answers put before a request's id."""


def add_debug_routes(app: FastAPI, core: Core) -> None:
    """Add them all; none of them needs a worker to be there."""
    _add_probes(app, core)
    _add_insight(app, core)
    _add_pages(app)


def _add_probes(app: FastAPI, core: Core) -> None:
    @app.get("/health", summary="Liveness: this process answers", tags=["Probes"])
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Readiness: a request could be served now", tags=["Probes"])
    async def ready() -> JSONResponse:
        is_ready, reason = core.ready()
        if is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)


def _add_insight(app: FastAPI, core: Core) -> None:
    @app.get("/metrics", summary="Metrics in Prometheus' text format", tags=["Insight"])
    async def metrics() -> Response:
        return Response(core.metrics_text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/v1/cluster", summary="Workers, their blocks and their load", tags=["Insight"])
    async def cluster() -> JSONResponse:
        return JSONResponse(core.cluster())

    @app.get("/debug/requests/{request_id:path}", summary="Where the time of a request went", tags=["Insight"])
    async def request_debug(request_id: str) -> JSONResponse:
        found = core.request_debug(request_id)
        for prefix in ID_PREFIXES:
            if found is None and request_id.startswith(prefix):
                found = core.request_debug(request_id.removeprefix(prefix))
        if found is None:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                f"The request {request_id[:150]!r} is unknown, or older than the last "
                f"{core.config.router.timelines_kept} (setting router.timelines_kept)",
            )
        return JSONResponse(found)

    @app.get("/debug/trace", summary="Requests as they end, as lines of a trace without text", tags=["Insight"])
    async def trace(seconds: str = "") -> Response:
        limit_s = float(seconds) if seconds.replace(".", "", 1).isdecimal() else 0.0
        if not 0 < limit_s <= MAX_TRACE_S:
            raise invalid(
                f"seconds must be a number above 0 and at most {MAX_TRACE_S}, got {seconds[:40]!r}", "seconds"
            )
        if core.recorder.is_crowded:
            message = f"{MAX_LISTENERS} recordings are under way already, no more are allowed"
            raise RequestError(ErrorCode.OVERLOADED, message, retry_after_s=RETRY_AFTER_S)
        lines = _until(core.recorder.listen(), asyncio.get_running_loop().time() + limit_s)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.get("/debug/steps", summary="The last engine steps of one worker, or of all", tags=["Insight"])
    async def steps(worker: str | None = None) -> JSONResponse:
        return JSONResponse(await core.steps(worker))


async def _until(lines: AsyncGenerator[bytes, None], end_s: float) -> AsyncGenerator[bytes, None]:
    """What comes until then, by the loop's clock."""
    async with aclosing(lines):
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout_at(end_s):  # around the wait alone: a slow client's is not ours to end
                    line = await anext(lines, None)
                if line is None:
                    return
                yield line


def _add_pages(app: FastAPI) -> None:
    chat, docs = Page("index.html"), Page("docs.html")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return chat.response()

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return docs.response()
