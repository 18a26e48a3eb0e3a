"""Answers in the shapes of the OpenAI API, made of the `openai` package's own types.

A chunk of a stream is dumped once for each choice and cut where its text stands; then a chunk costs one string.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function as CalledFunction
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from services.router.answers import Answer
from services.router.logprobs import TokenNames, Told
from services.router.tools.parsers import CallDelta
from services.router.types import TokenLogprobs

NOTHING: Mapping[str, Any] = MappingProxyType({})
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new of one choice, where it is more than text."""

    text: str = ""
    told: Sequence[Told] = ()
    start: int = 0  # characters of the prompt that the choice begins with
    calls: Sequence[CallDelta] = ()
    token_ids: Sequence[int] | None = None  # None: they were not asked for
    prompt_ids: Sequence[int] | None = None  # with the first piece of a choice only

    @property
    def is_text_only(self) -> bool:
        return not self.told and not self.calls and self.token_ids is None


class Shapes(Protocol):
    """How one endpoint writes its answers: JSON bytes, without the framing of events."""

    def first(self, index: int) -> bytes | None:
        """What opens a choice of a stream, before any text; None where nothing does."""
        ...

    def text(self, index: int, text: str) -> bytes: ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """The same for what is more than text."""
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
    calls: list[CallDelta] = field(default_factory=list)  # each whole
    token_ids: list[int] | None = None  # None: they were not asked for
    prompt_ids: Sequence[int] = ()
    told: list[Told] | None = None  # None: no logprobs were asked for
    start: int = 0  # characters of the prompt that the choice begins with
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # None: they were not asked for

    def add_call(self, delta: CallDelta) -> None:
        """Take in the next piece of a call."""
        if delta.index == len(self.calls):
            self.calls.append(delta)
        else:
            old = self.calls[delta.index]
            self.calls[delta.index] = CallDelta(old.index, old.id, old.name, old.arguments + delta.arguments)

    @property
    def ids(self) -> dict[str, Any]:
        """vLLM's field of a choice."""
        return {} if self.token_ids is None else {"token_ids": self.token_ids}

    def extra(self, names: TokenNames) -> dict[str, Any]:
        """Fields beside the API's own that tell of the prompt."""
        told = self.prompt_logprobs
        logprobs = {} if told is None else {"prompt_logprobs": names.prompt(told)}
        return logprobs if self.token_ids is None else {**logprobs, "prompt_token_ids": list(self.prompt_ids)}


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

    def piece(self, index: int, piece: Piece) -> bytes:
        delta = ChoiceDelta(content=piece.text) if piece.text or not piece.calls else ChoiceDelta()
        if piece.calls:
            delta.tool_calls = [_call_delta(call) for call in piece.calls]
        logprobs = ChunkLogprobs(**dict(self._names.chat(piece.told))) if piece.told else None
        ids = {} if piece.token_ids is None else {"token_ids": list(piece.token_ids)}
        above = {} if piece.prompt_ids is None else {"prompt_token_ids": list(piece.prompt_ids)}
        return self._chunk(index, delta, logprobs=logprobs, ids=ids, above=above)

    def end(self, index: int, reason: str) -> bytes:
        return self._chunk(index, ChoiceDelta(), cast(Reason, reason))

    def usage(self, usage: CompletionUsage) -> bytes:
        return _dump(ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[], usage=usage))

    def whole(self, choices: Sequence[Finished], usage: CompletionUsage) -> bytes:
        made = [
            ChatChoice(
                index=i,
                message=_message(x),
                finish_reason=cast(Reason, x.reason),
                logprobs=None if x.told is None else self._names.chat(x.told),
                **x.ids,
            )
            for i, x in enumerate(choices)
        ]
        extra = choices[0].extra(self._names)
        return _dump(ChatCompletion(**self._common, object="chat.completion", choices=made, usage=usage, **extra))

    def _chunk(
        self,
        index: int,
        delta: ChoiceDelta,
        reason: Reason | None = None,
        *,
        logprobs: ChunkLogprobs | None = None,
        ids: Mapping[str, Any] = NOTHING,
        above: Mapping[str, Any] = NOTHING,
    ) -> bytes:
        choice = ChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=logprobs, **ids)
        chunk = ChatCompletionChunk(
            **self._common, object="chat.completion.chunk", choices=[choice], **self._usage_null, **above
        )
        return _dump(chunk)


def _call_delta(call: CallDelta) -> ChoiceDeltaToolCall:
    if not call.id:
        return ChoiceDeltaToolCall(index=call.index, function=ChoiceDeltaToolCallFunction(arguments=call.arguments))
    function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return ChoiceDeltaToolCall(index=call.index, id=call.id, type="function", function=function)


def _message(x: Finished) -> ChatCompletionMessage:
    """Text beside calls is told; no text beside them is null."""
    if not x.calls:
        return ChatCompletionMessage(role="assistant", content=x.text, refusal=None)
    calls = [
        ChatCompletionMessageFunctionToolCall(
            id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in x.calls
    ]
    return ChatCompletionMessage(role="assistant", content=x.text or None, refusal=None, tool_calls=list(calls))


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

    def piece(self, index: int, piece: Piece) -> bytes:
        ids = {} if piece.token_ids is None else {"token_ids": list(piece.token_ids)}
        if piece.prompt_ids is not None:
            ids["prompt_token_ids"] = list(piece.prompt_ids)
        logprobs = self._names.completion(piece.told, piece.start) if piece.told else None
        return self._chunk(index, piece.text, None, logprobs, ids)

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
                **x.ids,
                **x.extra(self._names),
            )
            for i, x in enumerate(choices)
        ]
        return _dump(Completion.model_construct(**self._common, choices=made, usage=usage))

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Logprobs | None = None,
        ids: Mapping[str, Any] = NOTHING,
    ) -> bytes:
        # a chunk before the last has no reason yet; the type only knows whole answers
        choice = CompletionChoice.model_construct(
            index=index, text=text, logprobs=logprobs, finish_reason=reason, **ids
        )
        return _dump(Completion.model_construct(**self._common, choices=[choice], **self._usage_null))
