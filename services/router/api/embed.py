"""/v1/embeddings in OpenAI's shape, /score in vLLM's, over the vectors of `services.router.embedding`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from services.router.api.embed_ask import EmbedAsk, embed_ask, score_ask
from services.router.begin import CLIENT_CLOSED_REQUEST, ignored_header, read_body
from services.router.edge import ARRIVAL
from services.router.embedding import Vector, cosine, embed
from services.router.front import Arrival, Front
from services.router.live import ClientGone, Live


async def embeddings(front: Front, live: Live, request: Request) -> Response:
    """POST /v1/embeddings."""
    arrival: Arrival = request.scope[ARRIVAL]
    ask = embed_ask(await read_body(front, request), front.model, front.text.vocab_size)

    async def work() -> Mapping[str, Any]:
        found = await embed(front, ask, arrival)
        data = [{"object": "embedding", "index": i, "embedding": _shown(v, ask)} for i, v in enumerate(found.vectors)]
        usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
        return {"object": "list", "data": data, "model": front.model, "usage": usage}

    return await _answered(live, request, work(), ask)


async def score(front: Front, live: Live, request: Request) -> Response:
    """POST /score and /v1/score: the cosine of the angle between the vectors of two texts."""
    arrival: Arrival = request.scope[ARRIVAL]
    ask = score_ask(await read_body(front, request), front.model)

    async def work() -> Mapping[str, Any]:
        found = await embed(front, ask.texts, arrival)
        scores = [cosine(found.vectors[a], found.vectors[b]) for a, b in ask.pairs]
        return {
            "id": f"score-{arrival.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": front.model,
            "data": [{"index": i, "object": "score", "score": x} for i, x in enumerate(scores)],
            "usage": {
                "prompt_tokens": found.prompt_tokens,
                "total_tokens": found.prompt_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }

    return await _answered(live, request, work(), ask.texts)


async def _answered(
    live: Live, request: Request, work: Coroutine[Any, Any, Mapping[str, Any]], ask: EmbedAsk
) -> Response:
    """Raises RequestError."""
    try:
        body = await live.run(work, request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(data, media_type="application/json", headers=ignored_header(ask.ignored))


def _shown(vector: Vector, ask: EmbedAsk) -> Any:
    """Numbers, or their 32-bit floats, little-endian, in base64, which OpenAI's client asks for by itself."""
    if ask.is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float64).tolist()
