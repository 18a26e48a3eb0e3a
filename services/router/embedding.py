"""Vectors of texts: the mean of a text's last hidden states, as a prefill or mixed worker computes it.

    texts ─► token ids ─► one request of the flow for each, some at a time ─► vectors, in the order of the texts

Each text is a request like any other: admitted, booked, retried, metered and ended as one. The first that fails ends
all. Nothing is cached, neither vectors nor blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.admission.slo import read_slo
from services.router.api.embed_ask import EmbedAsk, Text
from services.router.front import Arrival, Front, outcome_of
from services.router.types import ACCEPT, FIRST_BYTE, TOKENIZED, RouterRequest, SamplingSpec, TokenFlow, new_request_id

AT_ONCE = 32
"""Texts of one request that workers have at the same time: they share batches, and leave room for others."""

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedded:
    """``vectors``: of each text, in order."""

    vectors: Sequence[Vector]
    prompt_tokens: int  # of all texts


async def embed(front: Front, ask: EmbedAsk, arrival: Arrival) -> Embedded:
    """Tokenize and compute. Cancelling it frees what runs.

    Raises:
        RequestError: of the first text that failed; ``param`` names it where it is at fault.
    """
    timeline = front.open(arrival)
    outcome = str(ErrorCode.INTERNAL)
    try:
        size = front.core.hidden_size()
        _check_dimensions(ask.dimensions, size, front.model)
        timeline.mark(ACCEPT)
        requests = await _requests(front, ask, arrival)
        timeline.mark(TOKENIZED)
        tokens = sum(len(request.prompt_ids) for request in requests)
        arrival.caller.take_prompt(tokens, time.monotonic())
        states = await _all(front.running.flow(front.core.flow, arrival.caller), requests)
        timeline.mark(FIRST_BYTE)
        vectors = [_vector(state, ask.normalize) for state in states]
        outcome = "ok"
        return Embedded(vectors, tokens)
    except (RequestError, asyncio.CancelledError) as exc:
        outcome = outcome_of(exc)
        raise
    finally:
        timeline.close(outcome)


def cosine(first: Vector, second: Vector) -> float:
    """Of two vectors of the length 1 (or of zeros)."""
    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def _check_dimensions(asked: int | None, size: int, model: str) -> None:
    """Raises RequestError for any number but the vectors' own: a part of a vector means little unless the model was
    trained for it (matryoshka), and no model that generates text is."""
    if asked not in (None, size):
        text = f"{model!r} gives vectors of {size} numbers and was not trained for shorter ones (matryoshka)"
        raise invalid(f"{text}, so dimensions can only be {size}, got {asked}", "dimensions")


async def _requests(front: Front, ask: EmbedAsk, arrival: Arrival) -> list[RouterRequest]:
    limits, found, left = front.core.config.limits, [], front.core.config.limits.text_tokens
    slo = replace(read_slo(arrival.slo, ask.slo, front.core.config.slo), tpot_ms=None)
    for index, (text, name) in enumerate(zip(ask.texts, ask.names, strict=True)):
        prompt_ids = await _encode(front, text, name, is_bare=ask.is_bare)
        left -= len(prompt_ids)
        if left < 0:
            raise invalid(f"the texts have more than {limits.text_tokens} tokens (limits.text_tokens)", name)
        request = RouterRequest(
            request_id=arrival.request_id if index == 0 else new_request_id(),
            prompt_ids=prompt_ids,
            sampling=SamplingSpec(max_tokens=1, temperature=0.0, seed=0),
            pools=True,
            tenant=arrival.caller.tenant,
            label=arrival.label,
            priority=ask.priority,
            slo=slo,
            received_s=arrival.received_s,
            budget_s=arrival.budget_s,
        )
        found.append(request)
    return found


async def _encode(front: Front, text: Text, name: str, *, is_bare: bool) -> tuple[int, ...]:
    ids = await front.text.encode_prompt(text, name, bare=is_bare) if isinstance(text, str) else text
    if len(ids) > front.text.context:
        message = f"{name} has {len(ids)} tokens; the context of this model is {front.text.context} tokens"
        raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=name)
    return ids


async def _all(flow: TokenFlow, requests: Sequence[RouterRequest]) -> list[bytes]:
    """The state of each; the first error ends all."""
    states = [b""] * len(requests)
    todo = iter(enumerate(requests))

    async def work() -> None:
        for index, request in todo:
            states[index] = await _one(flow, request)

    tasks = [asyncio.create_task(work()) for _ in range(min(AT_ONCE, len(requests)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return states


async def _one(flow: TokenFlow, request: RouterRequest) -> bytes:
    state = b""
    async with aclosing(flow.stream(request)) as events:
        async for event in events:
            state = event.pooled or state
    if not state:
        raise RequestError(ErrorCode.INTERNAL, "a worker ended a text without its hidden states")
    return state


def _vector(state: bytes, normalize: bool) -> Vector:
    vector: Vector = np.frombuffer(state, dtype="<f4")
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / norm).astype(np.float32) if normalize and norm else vector
