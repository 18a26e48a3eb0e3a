"""The Open Inference Protocol, version 2, as KServe and Triton clients speak it: text in, text out.

A model of this server is a text completer: see `services.router.grpc_tensors` for its tensors. ModelStreamInfer answers
the requests of a stream one after the other, each with as many responses as its answer has pieces; the last of each has
the parameter ``triton_final_response``, and an error of one request does not end the stream.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from services.protocol.errors import RequestError
from services.protocol.proto import open_inference_pb2 as oip
from services.router.access.rpc import current_caller
from services.router.answers import Answer, Delta, merged
from services.router.front import Arrival, Front, outcome_of
from services.router.grpc_errors import answering, internal, streaming
from services.router.grpc_front import arrival_of
from services.router.grpc_reading import all_readable
from services.router.grpc_tensors import completion_body, response
from services.router.validate import completion_ask

PLATFORM = "pdray"
VERSION = "1"
EXTENSIONS = ("model_stream_infer",)
FINAL = "triton_final_response"

_log = logging.getLogger("pdray.router")


class OpenInferenceServicer:
    """inference.GRPCInferenceService."""

    def __init__(self, front: Front) -> None:
        self._front = front

    @answering
    async def ServerLive(self, request: oip.ServerLiveRequest, grpc_context: Any) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    @answering
    async def ServerReady(self, request: oip.ServerReadyRequest, grpc_context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._front.core.ready()[0])

    @answering
    async def ModelReady(self, request: oip.ModelReadyRequest, grpc_context: Any) -> oip.ModelReadyResponse:
        is_known = request.name == self._front.model and request.version in ("", VERSION)
        return oip.ModelReadyResponse(ready=is_known and self._front.core.ready()[0])

    @answering
    async def ServerMetadata(self, request: oip.ServerMetadataRequest, grpc_context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(
            name="pdray", version=importlib.metadata.version("pdray"), extensions=EXTENSIONS
        )

    @answering
    async def ModelMetadata(self, request: oip.ModelMetadataRequest, grpc_context: Any) -> oip.ModelMetadataResponse:
        self._front.check_model(request.name)
        message = oip.ModelMetadataResponse(name=self._front.model, versions=[VERSION], platform=PLATFORM)
        message.inputs.add(name="text_input", datatype="BYTES", shape=[-1])
        for name in ("text_output", "finish_reason"):
            message.outputs.add(name=name, datatype="BYTES", shape=[-1])
        return message

    @answering
    async def ModelInfer(self, request: oip.ModelInferRequest, grpc_context: Any) -> oip.ModelInferResponse:
        arrival = arrival_of(request.id, grpc_context)
        answers = await self._answers(request, arrival)
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        async with aclosing(_deltas(answers)) as deltas:
            async for answer, delta in deltas:
                index = answer.index_of(delta)
                texts[index] = texts.get(index, "") + delta.text
                reasons[index] = delta.finish_reason or reasons.get(index, "")
        order = sorted(texts)
        return response(
            request, self._front.model, arrival.request_id, [texts[i] for i in order], [reasons[i] for i in order]
        )

    @streaming
    async def ModelStreamInfer(
        self, requests: AsyncIterator[oip.ModelInferRequest], grpc_context: Any
    ) -> AsyncGenerator[oip.ModelStreamInferResponse, None]:
        caller = current_caller()
        async for request in all_readable(requests):
            arrival = arrival_of(request.id, grpc_context)
            try:
                with self._front.guard.running(caller):
                    async with aclosing(self._pieces(request, arrival)) as pieces:
                        async for piece in pieces:
                            yield oip.ModelStreamInferResponse(infer_response=piece)
            except RequestError as exc:
                yield _failed(request, arrival, exc)
            except Exception:  # the edge of the process: the client gets an error, the log the reason
                _log.exception("ModelStreamInfer failed")
                yield _failed(request, arrival, internal())

    async def _pieces(
        self, request: oip.ModelInferRequest, arrival: Arrival
    ) -> AsyncGenerator[oip.ModelInferResponse, None]:
        answers = await self._answers(request, arrival)
        async with aclosing(_deltas(answers)) as deltas:
            async for answer, delta in deltas:
                message = response(request, self._front.model, arrival.request_id, [delta.text], [delta.finish_reason])
                message.parameters["choice"].int64_param = answer.index_of(delta)
                message.parameters[FINAL].bool_param = all(answer.is_complete for answer in answers)
                yield message

    async def _answers(self, request: oip.ModelInferRequest, arrival: Arrival) -> list[Answer]:
        front, timeline = self._front, self._front.open(arrival)
        try:
            body = completion_body(request)
            front.check_limits(body)
            ask = completion_ask(body, front.model, front.text.vocab_size)
            return await front.answers(ask, arrival, timeline)
        except (RequestError, asyncio.CancelledError) as exc:
            timeline.close(outcome_of(exc))
            raise


async def _deltas(answers: list[Answer]) -> AsyncGenerator[tuple[Answer, Delta], None]:
    """All pieces of all answers, which are closed whatever happens."""
    try:
        async with aclosing(merged(answers)) as deltas:
            async for answer, delta in deltas:
                yield answer, delta
                answer.first_byte()
    finally:
        for answer in answers:
            answer.close()


def _failed(request: oip.ModelInferRequest, arrival: Arrival, error: RequestError) -> oip.ModelStreamInferResponse:
    message = oip.ModelStreamInferResponse(error_message=f"{error.code}: {error.message}")
    message.infer_response.id = request.id or arrival.request_id
    message.infer_response.parameters[FINAL].bool_param = True
    return message
