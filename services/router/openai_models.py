"""Answers in the shapes of the OpenAI API, made of the `openai` package's own types.

A chunk of a stream is dumped once for each choice and cut where its text stands; then a chunk costs one string.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from services.router.answers import Answer
from services.router.logprobs import TokenNames, Told
from services.router.types import TokenLogprobs

Reason = Literal["stop", "length"]


class Shapes(Protocol):
    """How one endpoint writes its answers: JSON bytes, without the framing of events."""

    def first(self, index: int) -> bytes | None:
        """What opens a choice of a stream, before any text; None where nothing does."""
        ...

    def text(self, index: int, text: str) -> bytes: ...

    def told(self, index: int, text: str, told: Sequence[Told], start: int) -> bytes:
        """`text` with logprobs. ``start``: characters of the prompt that the choice begins with."""
        ...

    def end(self, index: int, reason: str) -> bytes: ...

    def usage(self, usage: CompletionUsage) -> bytes:
        """The last chunk: no choices."""
        ...

    def whole(self, choices: Sequence[Finished], usage: CompletionUsage) -> bytes: ...


@dataclass(slots=True)
class Finished:
    """A choice of an answer that is not streamed, as it comes together."""

    text: str = ""
    reason: str = ""
    told: list[Told] | None = None  # None: no logprobs were asked for
    start: int = 0  # characters of the prompt that the choice begins with
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # None: they were not asked for

    def extra(self, names: TokenNames) -> dict[str, Any]:
        """Fields beside the API's own."""
        told = self.prompt_logprobs
        return {} if told is None else {"prompt_logprobs": names.prompt(told)}


def usage_of(answers: Sequence[Answer]) -> CompletionUsage:
    """Tokens of all answers; cached ones are prompt tokens whose KV was there before the request."""
    prompt = sum(a.prompt_tokens for a in answers)
    completion = sum(a.completion_tokens for a in answers)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(a.cached_tokens for a in answers)),
    )


def model_json(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of /v1/models, with the context's length beside the API's own fields."""
    model = Model(id=name, created=created, object="model", owned_by="pdray")
    return {**model.model_dump(), "max_model_len": max_model_len}


def _dump(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True).encode()


class _Cut:
    """A dumped chunk as the bytes before its text and those after it."""

    def __init__(self, dumped: bytes, mark: str) -> None:
        self._head, self._tail = dumped.split(json.dumps(mark).encode())

    def with_text(self, text: str) -> bytes:
        return self._head + json.dumps(text, ensure_ascii=False).encode() + self._tail


class ChatShapes:
    """/v1/chat/completions."""

    def __init__(self, request_id: str, model: str, fingerprint: str, *, names: TokenNames, usage_null: bool) -> None:
        """``usage_null``: chunks say ``"usage": null``, as a stream does that ends with one."""
        self._names = names
        self._common: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._usage_null: dict[str, Any] = {"usage": None} if usage_null else {}
        self._mark = uuid.uuid4().hex
        self._cuts: dict[int, _Cut] = {}

    def first(self, index: int) -> bytes:
        return self._chunk(index, ChoiceDelta(role="assistant", content=""))

    def text(self, index: int, text: str) -> bytes:
        cut = self._cuts.get(index)
        if cut is None:
            cut = self._cuts[index] = _Cut(self._chunk(index, ChoiceDelta(content=self._mark)), self._mark)
        return cut.with_text(text)

    def told(self, index: int, text: str, told: Sequence[Told], start: int) -> bytes:
        logprobs = ChunkLogprobs.model_construct(**dict(self._names.chat(told)))
        return self._chunk(index, ChoiceDelta(content=text), logprobs=logprobs)

    def end(self, index: int, reason: str) -> bytes:
        return self._chunk(index, ChoiceDelta(), cast(Reason, reason))

    def usage(self, usage: CompletionUsage) -> bytes:
        return _dump(ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[], usage=usage))

    def whole(self, choices: Sequence[Finished], usage: CompletionUsage) -> bytes:
        made = [
            ChatChoice(
                index=i,
                message=ChatCompletionMessage(role="assistant", content=x.text, refusal=None),
                finish_reason=cast(Reason, x.reason),
                logprobs=None if x.told is None else self._names.chat(x.told),
            )
            for i, x in enumerate(choices)
        ]
        extra = choices[0].extra(self._names)
        return _dump(ChatCompletion(**self._common, object="chat.completion", choices=made, usage=usage, **extra))

    def _chunk(
        self, index: int, delta: ChoiceDelta, reason: Reason | None = None, logprobs: ChunkLogprobs | None = None
    ) -> bytes:
        choice = ChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=logprobs)
        return _dump(
            ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[choice], **self._usage_null)
        )


class CompletionShapes:
    """/v1/completions."""

    def __init__(self, request_id: str, model: str, fingerprint: str, *, names: TokenNames, usage_null: bool) -> None:
        self._names = names
        self._common: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._usage_null: dict[str, Any] = {"usage": None} if usage_null else {}
        self._mark = uuid.uuid4().hex
        self._cuts: dict[int, _Cut] = {}

    def first(self, index: int) -> None:
        return None

    def text(self, index: int, text: str) -> bytes:
        cut = self._cuts.get(index)
        if cut is None:
            cut = self._cuts[index] = _Cut(self._chunk(index, self._mark, None), self._mark)
        return cut.with_text(text)

    def told(self, index: int, text: str, told: Sequence[Told], start: int) -> bytes:
        return self._chunk(index, text, None, self._names.completion(told, start))

    def end(self, index: int, reason: str) -> bytes:
        return self._chunk(index, "", reason)

    def usage(self, usage: CompletionUsage) -> bytes:
        return _dump(Completion(**self._common, choices=[], usage=usage))

    def whole(self, choices: Sequence[Finished], usage: CompletionUsage) -> bytes:
        made = [
            CompletionChoice.model_construct(
                index=i,
                text=x.text,
                finish_reason=cast(Reason, x.reason),
                logprobs=None if x.told is None else self._names.completion(x.told, x.start),
                **x.extra(self._names),
            )
            for i, x in enumerate(choices)
        ]
        return _dump(Completion.model_construct(**self._common, choices=made, usage=usage))

    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Logprobs | None = None) -> bytes:
        # a chunk before the last has no reason yet; the type only knows whole answers
        choice = CompletionChoice.model_construct(index=index, text=text, logprobs=logprobs, finish_reason=reason)
        return _dump(Completion.model_construct(**self._common, choices=[choice], **self._usage_null))
