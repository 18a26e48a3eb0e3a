"""gRPC for clients: pdray.v1.Inference.

The servicer serves on the router's own `grpc.aio` server and, method by method, behind Ray Serve's gRPC proxy, whose
context has no `abort` and no deadline. Who calls is `current_caller`; see `services.router.access.rpc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.protocol.proto import inference_pb2
from services.router.access.keys import ADMIN
from services.router.access.rpc import current_caller, raw_metadata
from services.router.admission.slo import slo_headers
from services.router.api.embed_ask import embed_ask
from services.router.embedding import embed
from services.router.front import Arrival, Front, label_of, outcome_of
from services.router.grpc_bodies import chat_body, embed_body, generate_body, messages_body, piece
from services.router.grpc_errors import answering, remaining_s, streaming
from services.router.validate import Ask, chat_ask, completion_ask

ID_PREFIXES = ("chatcmpl-", "cmpl-")
"""What HTTP answers put before a request's id."""


class InferenceServicer:
    """The same checks, texts and errors as over HTTP."""

    def __init__(self, front: Front) -> None:
        self._front = front

    @streaming
    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Stream the answer; cancelling the call, or its deadline, frees the request on its workers."""
        arrival = arrival_of(request.request_id, grpc_context)
        async with aclosing(self._answer(lambda: generate_body(request), completion_ask, arrival)) as messages:
            async for message in messages:
                yield message

    @streaming
    async def Chat(
        self, request: inference_pb2.ChatRequest, grpc_context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Likewise the answer to a chat."""
        arrival = arrival_of(request.request_id, grpc_context)
        async with aclosing(self._answer(lambda: chat_body(request), chat_ask, arrival)) as messages:
            async for message in messages:
                yield message

    @answering
    async def Embed(self, request: inference_pb2.EmbedRequest, grpc_context: Any) -> inference_pb2.EmbedResponse:
        """The same vectors as over HTTP."""
        front, body = self._front, embed_body(request)
        front.check_limits(body)
        ask = embed_ask(body, front.model, front.text.vocab_size)
        found = await embed(front, ask, arrival_of(request.request_id, grpc_context))
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=vector.tolist()) for vector in found.vectors],
            usage=inference_pb2.Usage(prompt_tokens=found.prompt_tokens),
        )

    @answering
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, grpc_context: Any
    ) -> inference_pb2.TokenizeResponse:
        self._front.check_model(request.model)
        front, kind = self._front, request.WhichOneof("input")
        if kind is None:
            raise invalid("neither text nor chat is given", "text")
        if kind == "text":
            ids = await front.text.encode_prompt(request.text, "text")
        else:
            body = {"messages": messages_body(request.chat.messages)}
            front.check_limits(body)
            ask = chat_ask(body, front.model, front.text.vocab_size)
            ids = await front.text.encode_chat(ask.messages, ask.chat_options)
        return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=front.text.context)

    @answering
    async def GetModel(self, request: inference_pb2.GetModelRequest, grpc_context: Any) -> inference_pb2.Model:
        front, card = self._front, self._front.core.card
        return inference_pb2.Model(
            id=front.model,
            architecture=card.architecture,
            max_model_len=front.text.context,
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            fingerprint=card.model_fingerprint,
            tokenizer_fingerprint=card.tokenizer_fingerprint,
            has_chat_template=bool(card.chat_template),
            can_embed=_can_embed(front),
        )

    @answering
    async def GetLoad(self, request: inference_pb2.GetLoadRequest, grpc_context: Any) -> inference_pb2.Load:
        front = self._front
        is_ready, reason = front.core.ready()
        load = inference_pb2.Load(is_ready=is_ready, reason=reason, running_requests=len(front.running))
        for worker in front.core.cluster().get("workers", ()):
            load.workers.add(
                worker_id=worker["worker_id"],
                role=worker["role"],
                state=worker["state"],
                running=worker["running"],
                waiting=worker["waiting"],
                blocks_total=worker["blocks"]["total"],
                blocks_free=worker["blocks"]["free"],
                step_ms=worker["step_ms"],
            )
        return load

    @answering
    async def Abort(self, request: inference_pb2.AbortRequest, grpc_context: Any) -> inference_pb2.AbortResponse:
        """Administrators may end anybody's request, others those of their tenant."""
        caller, asked = current_caller(), request.request_id
        if not asked:
            raise invalid("request_id is missing", "request_id")
        tenant = None if ADMIN in caller.scopes else caller.tenant
        names = {asked, label_of(asked), *(asked.removeprefix(prefix) for prefix in ID_PREFIXES)}
        aborted = sum(self._front.running.abort(name, tenant) for name in sorted(names))
        if tenant is None and self._front.guard.wants_keys:
            self._front.guard.audit.tell(
                action=f"Abort {label_of(asked)}", outcome=f"{aborted} ended", key=caller.name, tenant=caller.tenant
            )
        return inference_pb2.AbortResponse(aborted=aborted)

    async def _answer(
        self,
        body: Callable[[], Mapping[str, Any]],
        check: Callable[[Mapping[str, Any], str, int], Ask],
        arrival: Arrival,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        front, timeline = self._front, self._front.open(arrival)
        try:
            given = body()
            front.check_limits(given)
            ask = check(given, front.model, front.text.vocab_size)
            answer = (await front.answers(ask, arrival, timeline))[0]
        except (RequestError, asyncio.CancelledError) as exc:
            timeline.close(outcome_of(exc))
            raise
        is_first = True
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    yield piece(answer, delta, arrival.request_id, is_first=is_first)
                    answer.first_byte()
                    is_first = False
        finally:
            answer.close()


def _can_embed(front: Front) -> bool:
    """Whether a worker that is there now would."""
    try:
        return front.core.hidden_size() > 0
    except RequestError:
        return False


def arrival_of(label: str, grpc_context: Any) -> Arrival:
    """A call as it reached this front."""
    return Arrival(
        label=label_of(label),
        budget_s=remaining_s(grpc_context),
        slo=slo_headers(raw_metadata(grpc_context)),
        caller=current_caller(),
    )
