"""Sends one request of a run, and turns what comes back into a record. Whatever goes wrong becomes a failed record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.bench.load.answer import Answer
from services.bench.load.http import Clock, HttpError, Pool, Reply
from services.bench.load.prompts import IdRange, Prompt, text, token_ids
from services.bench.load.records import Record
from services.bench.load.workloads import Item

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM = "text/event-stream"
OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How requests are written."""

    endpoint: str
    model: str
    ids: IdRange | None  # None: prompts are text
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, item: Item) -> bytes:
        data: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == CHAT:
            data["messages"] = [{"role": "user", "content": text(item.prompt)}]
        else:
            data["prompt"] = self._prompt(item.prompt)
        if self.temperature is not None:
            data["temperature"] = self.temperature
        if self.ignore_eos:
            data["ignore_eos"] = True
        return json.dumps(data | dict(self.extra_body)).encode()

    def _prompt(self, prompt: Prompt) -> str | list[int]:
        return text(prompt) if self.ids is None else token_ids(prompt, self.ids)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a run. ``at_s``: when it is due since the start; None in a closed loop."""

    index: int
    item: Item
    at_s: float | None = None


class Client:
    """Sends jobs over a pool. ``encode`` may run ahead of the send; ``send`` starts with the bytes at hand."""

    def __init__(self, pool: Pool, form: Form, timeout_s: float) -> None:
        self._pool = pool
        self._form = form
        self._timeout_s = timeout_s
        self._encoded: dict[int, bytes] = {}

    @property
    def clock(self) -> Clock:
        return self._pool.clock

    def encode(self, job: Job) -> None:
        """Make the request's bytes now; a second call does nothing."""
        if job.index not in self._encoded:
            body = self._form.body(job.item)
            target = self._pool.target
            self._encoded[job.index] = target.request("POST", self._form.endpoint, self._pool.headers, body)

    async def send(self, job: Job, due_s: float, lag_from_s: float | None) -> Record:
        """One request from its send to its end.

        Args:
            due_s: what latencies count from.
            lag_from_s: when the tool could have sent it; None where that is not known.
        """
        self.encode(job)
        request = self._encoded.pop(job.index)
        answer = Answer()
        sent_s = self.clock()
        lag_s = None if lag_from_s is None else max(0.0, sent_s - lag_from_s)
        error = await self._exchange(request, answer)
        return Record(
            index=job.index,
            due_s=due_s,
            sent_s=sent_s,
            first_s=answer.first_s,
            last_s=answer.last_s,
            done_s=self.clock(),
            lag_s=lag_s,
            chunks=answer.chunks,
            gaps_s=answer.gaps_s,
            input_tokens=answer.count("prompt_tokens"),
            output_tokens=answer.count("completion_tokens"),
            cached_tokens=answer.cached_tokens,
            error=error,
            answer_id=answer.answer_id,
        )

    async def _exchange(self, request: bytes, answer: Answer) -> str:
        """ "" for a success, else what went wrong."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._pool.ask(request, answer.feed)
            answer.close(self.clock())
        except TimeoutError:
            return f"timeout: no end within {self._timeout_s:g} s"
        except HttpError as exc:
            return f"{exc.kind}: {exc}"
        except (ValueError, TypeError, AttributeError) as exc:  # JSON of another shape, at the very end
            return f"bad_answer: {exc}"
        return _refusal(reply) or answer.failure()


def _refusal(reply: Reply) -> str:
    if reply.status != 200:
        return f"http_{reply.status}: {_shown(reply.text)}"
    if not reply.num_bytes:
        return "empty: HTTP 200 without a body"
    if reply.content_type != STREAM:
        return f"no_stream: the answer is {reply.content_type or 'of no type'}, not {STREAM}"
    return ""


def _shown(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:300]
