"""/v1/responses in the `openai` package's own types: one document, or events in the order the API documents.

created ─► in_progress ─► (item added ─► part added ─► deltas ─► done ─► part done ─► item done)* ─► completed
                                                                                   └─► incomplete | failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from openai.types import responses as api
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_text_delta_event import Logprob as DeltaLogprob
from openai.types.responses.response_text_delta_event import LogprobTopLogprob as DeltaTop
from openai.types.responses.response_text_done_event import Logprob as DoneLogprob
from openai.types.responses.response_text_done_event import LogprobTopLogprob as DoneTop
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from services.protocol.errors import RequestError
from services.router.answers import Answer, Delta
from services.router.api.responses_ask import ResponseAsk
from services.router.logprobs import TokenNames, Told
from services.router.tools.parsers import CallDelta
from services.router.tools.spec import Function

Item = api.ResponseOutputMessage | api.ResponseFunctionToolCall


def _event(model: BaseModel) -> bytes:
    return f"event: {model.type}\ndata: {_json(model)}\n\n".encode()  # type: ignore[attr-defined]


def _json(model: BaseModel) -> str:
    return model.model_dump_json(exclude_unset=True, by_alias=True, warnings=False)


class ResponseWriter:
    """Writes one response. Feed it every delta; items come in the order in which the model wrote them."""

    def __init__(self, request_id: str, model: str, asked: ResponseAsk, names: TokenNames) -> None:
        self._id = request_id
        self._names = names
        self._output: list[Item] = []
        self._told: list[Told] = []
        self._logprobs = asked.ask.shaping.logprobs is not None
        self._text: list[str] | None = None  # of the open message
        self._arguments: list[str] = []  # of the open call
        self._number = 0
        self._length = False
        self._base = _base(request_id, model, asked)

    def opening(self, _answer: Answer) -> bytes:
        """What a stream begins with."""
        return b"".join(
            self._made(kind, response=self._response("in_progress"))
            for kind in (api.ResponseCreatedEvent, api.ResponseInProgressEvent)
        )

    def delta(self, delta: Delta) -> bytes:
        """Events of what is new."""
        out: list[bytes] = []
        if delta.text or delta.told:
            out += self._say(delta.text, delta.told)
        for call in delta.calls:
            out += self._call(call)
        if delta.finish_reason:
            self._length = delta.finish_reason == "length"
            if not self._output:
                out += self._say("", ())  # an answer without a token is an empty message
            out += self._close_item()
        return b"".join(out)

    def closing(self, answer: Answer) -> bytes:
        """What a stream ends with."""
        if self._length:
            return self._made(api.ResponseIncompleteEvent, response=self._finished(answer))
        return self._made(api.ResponseCompletedEvent, response=self._finished(answer))

    def failed(self, error: RequestError) -> bytes:
        """What a stream ends with that fails after its start."""
        failure = api.ResponseError(code="server_error", message=error.message)
        return self._made(api.ResponseFailedEvent, response=self._response("failed", error=failure))

    def whole(self, answer: Answer) -> bytes:
        """The answer as one document, after its last delta."""
        return _json(self._finished(answer)).encode()

    # --- items ---

    def _say(self, text: str, told: Sequence[Told]) -> list[bytes]:
        out: list[bytes] = []
        if self._text is None:
            out += self._close_item()
            message = api.ResponseOutputMessage(
                id=f"msg_{self._id}_{len(self._output)}",
                type="message",
                role="assistant",
                status="in_progress",
                content=[],
            )
            self._output.append(message)
            self._text = []
            out.append(self._made(api.ResponseOutputItemAddedEvent, item=message, output_index=self._at))
            out.append(self._part(api.ResponseContentPartAddedEvent, _text_part("")))
        self._text.append(text)
        self._told += told
        if text or told:
            logprobs = [_told(x, DeltaLogprob, DeltaTop) for x in self._names.chat(told).content or []]
            out.append(self._in_part(api.ResponseTextDeltaEvent, delta=text, logprobs=logprobs))
        return out

    def _call(self, call: CallDelta) -> list[bytes]:
        out: list[bytes] = []
        if call.id:
            out += self._close_item()
            item = api.ResponseFunctionToolCall(
                id=f"fc_{uuid.uuid4().hex}",
                type="function_call",
                status="in_progress",
                call_id=call.id,
                name=call.name,
                arguments="",
            )
            self._output.append(item)
            out.append(self._made(api.ResponseOutputItemAddedEvent, item=item, output_index=self._at))
        self._arguments.append(call.arguments)
        if call.arguments:
            out.append(self._in_item(api.ResponseFunctionCallArgumentsDeltaEvent, delta=call.arguments))
        return out

    def _close_item(self) -> list[bytes]:
        if not self._output or self._output[-1].status != "in_progress":
            return []
        item, out = self._output[-1], []
        item.status = "incomplete" if self._length else "completed"
        if isinstance(item, api.ResponseFunctionToolCall):
            item.arguments, self._arguments = "".join(self._arguments), []
            done = api.ResponseFunctionCallArgumentsDoneEvent
            out.append(self._in_item(done, arguments=item.arguments))
        else:
            out += self._close_text(item)
        return [*out, self._made(api.ResponseOutputItemDoneEvent, item=item, output_index=self._at)]

    def _close_text(self, item: api.ResponseOutputMessage) -> list[bytes]:
        part = _text_part("".join(self._text or []))
        content = self._names.chat(self._told).content or []
        if self._logprobs:
            kind = api.response_output_text
            part.logprobs = [
                kind.Logprob(
                    token=x.token,
                    logprob=x.logprob,
                    bytes=x.bytes or [],
                    top_logprobs=[
                        kind.LogprobTopLogprob(token=t.token, logprob=t.logprob, bytes=t.bytes or [])
                        for t in x.top_logprobs
                    ],
                )
                for x in content
            ]
        item.content = [part]
        self._text, self._told = None, []
        logprobs = [_told(x, DoneLogprob, DoneTop) for x in content]
        return [
            self._in_part(api.ResponseTextDoneEvent, text=part.text, logprobs=logprobs),
            self._part(api.ResponseContentPartDoneEvent, part),
        ]

    # --- events ---

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    def _made(self, kind: Callable[..., BaseModel], **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return _event(kind(sequence_number=number, type=EVENT_NAMES[kind], **fields))

    def _in_item(self, kind: Callable[..., BaseModel], **fields: Any) -> bytes:
        return self._made(kind, item_id=self._output[-1].id, output_index=self._at, **fields)

    def _in_part(self, kind: Callable[..., BaseModel], **fields: Any) -> bytes:
        return self._in_item(kind, content_index=0, **fields)

    def _part(self, kind: Callable[..., BaseModel], part: api.ResponseOutputText) -> bytes:
        return self._in_part(kind, part=part)

    # --- the response itself ---

    def _finished(self, answer: Answer) -> api.Response:
        usage = api.ResponseUsage(
            input_tokens=answer.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=answer.cached_tokens, cache_write_tokens=0),
            output_tokens=answer.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=answer.prompt_tokens + answer.completion_tokens,
        )
        if self._length:
            reason = IncompleteDetails(reason="max_output_tokens")
            return self._response("incomplete", output=self._output, usage=usage, incomplete_details=reason)
        return self._response("completed", output=self._output, usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, **more: Any) -> api.Response:
        blank: dict[str, Any] = {"output": [], "usage": None, "error": None, "incomplete_details": None}
        # not validated: what it repeats of the request was checked field by field, and must not fail here
        return api.Response.model_construct(**{**self._base, **blank, **more, "status": status})


def _base(request_id: str, model: str, asked: ResponseAsk) -> dict[str, Any]:
    ask = asked.ask
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": asked.instructions,
        "max_output_tokens": ask.max_tokens,
        "parallel_tool_calls": ask.tools.is_parallel,
        "previous_response_id": None,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "text": {"format": dict(asked.form)},
        "tool_choice": asked.tool_choice,
        "tools": [_tool(function) for function in ask.tools.functions],
        "truncation": "disabled",
        **asked.labels,
    }


def _tool(function: Function) -> dict[str, Any]:
    told = {"type": "function", "name": function.name, "strict": function.strict, "parameters": function.parameters}
    return {**told, "description": function.description} if function.description else told


def _text_part(text: str) -> api.ResponseOutputText:
    return api.ResponseOutputText(type="output_text", text=text, annotations=[])


def _told(x: Any, kind: Callable[..., Any], top: Callable[..., Any]) -> Any:
    tops = [top(token=t.token, logprob=t.logprob) for t in x.top_logprobs]
    return kind(token=x.token, logprob=x.logprob, top_logprobs=tops)


EVENT_NAMES: dict[Any, str] = {
    api.ResponseCreatedEvent: "response.created",
    api.ResponseInProgressEvent: "response.in_progress",
    api.ResponseCompletedEvent: "response.completed",
    api.ResponseIncompleteEvent: "response.incomplete",
    api.ResponseFailedEvent: "response.failed",
    api.ResponseOutputItemAddedEvent: "response.output_item.added",
    api.ResponseOutputItemDoneEvent: "response.output_item.done",
    api.ResponseContentPartAddedEvent: "response.content_part.added",
    api.ResponseContentPartDoneEvent: "response.content_part.done",
    api.ResponseTextDeltaEvent: "response.output_text.delta",
    api.ResponseTextDoneEvent: "response.output_text.done",
    api.ResponseFunctionCallArgumentsDeltaEvent: "response.function_call_arguments.delta",
    api.ResponseFunctionCallArgumentsDoneEvent: "response.function_call_arguments.done",
}
