"""gRPC for clients: pdray.v1.Inference, and grpc.health.v1 with readiness and liveness.

Both servicers serve on the router's own `grpc.aio` server and, method by method, behind Ray Serve's gRPC proxy, whose
context has no `abort` and no deadline. Reflection is the server's business (see `services.router.serve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import inference_pb2
from services.protocol.status import trailing_of
from services.router.answers import Answer
from services.router.front import Arrival, Front, label_of, outcome_of
from services.router.types import Core, TokenLogprobs
from services.router.validate import completion_ask

INFERENCE = "pdray.v1.Inference"
READY_NAMES = ("", "readiness", INFERENCE)
LIVE_NAME = "liveness"
WATCH_PERIOD_S = 1.0
MAX_DETAILS_CHARS = 2048
NO_DEADLINE_S = 10 * 365 * 86_400.0
"""gRPC tells an absent deadline as one in the far future, or as None."""

_OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_log = logging.getLogger("pdray.router")


class InferenceServicer:
    """Generate: the same checks, texts and errors as /v1/completions."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Stream the answer; cancelling the call, or its deadline, frees the request on its workers."""
        arrival = Arrival(label=label_of(request.request_id), budget_s=_remaining_s(grpc_context))
        try:
            async with aclosing(self._answer(request, arrival)) as messages:
                async for message in messages:
                    yield message
        except RequestError as exc:
            await fail(grpc_context, exc)
        except Exception:  # the edge of the process: the client gets an error, the log the reason
            _log.exception("Generate failed")
            await fail(grpc_context, RequestError(ErrorCode.INTERNAL, "the router failed to answer; see its log"))

    async def _answer(
        self, request: inference_pb2.GenerateRequest, arrival: Arrival
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        front, timeline = self._front, self._front.open(arrival)
        try:
            ask = completion_ask(_as_body(request), front.model, front.text.vocab_size)
            answer = (await front.answers(ask, arrival, timeline))[0]
        except (RequestError, asyncio.CancelledError) as exc:
            timeline.close(outcome_of(exc))
            raise
        told_prompt = False
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    message = inference_pb2.GenerateResponse(
                        request_id=arrival.request_id,
                        text=delta.text,
                        token_ids=delta.token_ids,
                        finish_reason=delta.finish_reason,
                        choice=delta.choice,
                    )
                    message.logprobs.extend(_told(x) for x in delta.logprobs)
                    if not told_prompt and answer.request.sampling.shaping.prompt_logprobs is not None:
                        message.prompt_logprobs.extend(_told(x) for x in answer.prompt_logprobs)
                        told_prompt = True
                    if answer.is_complete:
                        message.usage.CopyFrom(_usage(answer))
                    yield message
                    answer.first_byte()
        finally:
            answer.close()


class HealthServicer:
    """grpc.health.v1: "liveness" is this process, every other known name is whether a request could be served now."""

    def __init__(self, core: Core, watch_period_s: float = WATCH_PERIOD_S) -> None:
        self._core = core
        self._watch_period_s = watch_period_s

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            names = ", ".join(repr(name) for name in (*READY_NAMES, LIVE_NAME))
            await fail(grpc_context, RequestError(ErrorCode.NOT_FOUND, f"unknown service; known here: {names}"))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The status now and whenever it changes, until the client ends the call."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(self._watch_period_s)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        known = health_pb2.HealthCheckResponse
        if service == LIVE_NAME:
            return known.SERVING
        if service not in READY_NAMES:
            return known.SERVICE_UNKNOWN
        return known.SERVING if self._core.ready()[0] else known.NOT_SERVING


async def fail(context: Any, error: RequestError) -> NoReturn:
    """End the call with the error's status, its code and the advised wait in trailing metadata.

    Raises: what the context's own ``abort`` raises, or, behind Serve's proxy, ``error`` itself.
    """
    code = grpc.StatusCode[error.status.grpc]
    details = error.message[:MAX_DETAILS_CHARS]
    metadata = trailing_of(error)
    if hasattr(context, "abort"):
        await context.abort(code, details, tuple(metadata))
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)
    raise error


def _remaining_s(context: Any) -> float | None:
    left = context.time_remaining() if hasattr(context, "time_remaining") else None
    return None if left is None or left > NO_DEADLINE_S else max(0.0, float(left))


def _as_body(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """The message as the body of a completion, so that one set of rules checks both."""
    sampling = request.sampling
    body: dict[str, Any] = {"stop": list(sampling.stop), "ignore_eos": sampling.ignore_eos}
    for name in _OPTIONAL:
        if sampling.HasField(name):
            body[name] = getattr(sampling, name)
    body["logit_bias"] = {str(token_id): value for token_id, value in sampling.logit_bias.items()}
    if sampling.HasField("structured_outputs"):
        body["structured_outputs"] = _structured(sampling.structured_outputs)
    body["stop_token_ids"] = list(sampling.stop_token_ids)
    body["model"] = request.model or None
    body["cache_salt"] = request.cache_salt
    kind = request.WhichOneof("input")
    if kind is not None:
        body["prompt"] = request.prompt if kind == "prompt" else list(request.token_ids.ids)
    return body


def _structured(options: inference_pb2.StructuredOutputs) -> dict[str, Any]:
    kind = options.WhichOneof("kind")
    if kind is None:
        return {}
    value = getattr(options, kind)
    return {kind: list(value.texts) if kind == "choice" else value}


def _told(x: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=x.token_id,
        logprob=x.logprob,
        rank=x.rank,
        top_ids=[token_id for token_id, _ in x.top],
        top_logprobs=[logprob for _, logprob in x.top],
    )


def _usage(answer: Answer) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
    )
