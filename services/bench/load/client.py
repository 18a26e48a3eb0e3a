"""Sends one request of a run, and turns what comes back into a record. Whatever goes wrong becomes a failed record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.load.answer import Answer
from services.bench.load.http import Clock, HttpError, Pool, Reply
from services.bench.load.job import Job as Job
from services.bench.load.pictures import data_url
from services.bench.load.prompts import IdRange, text, token_ids
from services.bench.load.records import Record
from services.bench.load.workloads import Item

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM = "text/event-stream"
OnRecord = Callable[[Record], None]
Said = Sequence[str]
"""Texts of a conversation so far: asked, answered, asked, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How requests are written."""

    endpoint: str
    model: str
    ids: IdRange | None  # None: prompts are text
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, item: Item, before: Said = ()) -> bytes:
        data: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == CHAT:
            said = [*before, words(item)]
            data["messages"] = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
            if item.pictures:
                data["messages"][-1]["content"] = parts(item)
        else:
            data["prompt"] = self._prompt(item, before)
        if self.temperature is not None:
            data["temperature"] = self.temperature
        if self.ignore_eos:
            data["ignore_eos"] = True
        return json.dumps(data | dict(self.extra_body)).encode()

    def _prompt(self, item: Item, before: Said) -> str | list[int]:
        if self.ids is None or item.text or before:
            return " ".join([*before, words(item)])
        return token_ids(item.prompt, self.ids)


def words(item: Item) -> str:
    """What an item asks, as text."""
    return item.text or text(item.prompt)


def parts(item: Item) -> list[dict[str, Any]]:
    """What an item asks, as text and pictures."""
    pictures = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in item.pictures]
    return [{"type": "text", "text": words(item)}, *pictures]


class Client:
    """Sends jobs over a pool. ``encode`` may run ahead of the send; ``send`` starts with the bytes at hand.

    ``keys``: an API key for each tenant, sent as a bearer token.
    """

    def __init__(self, pool: Pool, form: Form, timeout_s: float, keys: Mapping[str, str] | None = None) -> None:
        self._pool = pool
        self._form = form
        self._timeout_s = timeout_s
        self._keys = keys or {}
        self._encoded: dict[int, bytes] = {}
        self._said: dict[int, list[str]] = {}  # by conversation

    @property
    def clock(self) -> Clock:
        return self._pool.clock

    def encode(self, job: Job) -> None:
        """Make the request's bytes now; a second call does nothing. A later turn needs the answers before it."""
        if job.index not in self._encoded:
            said = () if job.conversation is None else self._said.get(job.conversation, ())
            headers = self._pool.headers
            if key := self._keys.get(job.tenant):
                headers = {**headers, "Authorization": f"Bearer {key}"}
            body = self._form.body(job.item, said)
            self._encoded[job.index] = self._pool.target.request("POST", self._form.endpoint, headers, body)

    def forget(self) -> None:
        """The run is over: what was encoded for it and never sent, and what was said."""
        self._encoded.clear()
        self._said.clear()

    async def send(self, job: Job, due_s: float, lag_from_s: float | None) -> Record:
        """One request from its send to its end.

        Args:
            due_s: what latencies count from.
            lag_from_s: when the tool could have sent it; None where that is not known.
        """
        self.encode(job)
        request = self._encoded.pop(job.index)
        answer = Answer(keeps_text=job.then is not None)
        sent_s = self.clock()
        lag_s = None if lag_from_s is None else max(0.0, sent_s - lag_from_s)
        error, is_cancelled = await self._exchange(request, answer, job.cancel_after_s)
        self._remember(job, answer)
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
            is_cancelled=is_cancelled,
            answer_id=answer.answer_id,
            tenant=job.tenant,
        )

    def _remember(self, job: Job, answer: Answer) -> None:
        if job.conversation is None:
            return
        if job.then is None:
            self._said.pop(job.conversation, None)
        else:
            self._said.setdefault(job.conversation, []).extend((words(job.item), answer.text))

    async def _exchange(self, request: bytes, answer: Answer, cancel_after_s: float | None) -> tuple[str, bool]:
        """("", False) for a success, ("", True) where the client hung up as planned, else what went wrong."""
        may_cancel = cancel_after_s is not None and cancel_after_s < self._timeout_s
        try:
            async with asyncio.timeout(cancel_after_s if may_cancel else self._timeout_s):
                reply = await self._pool.ask(request, answer.feed)
            answer.close(self.clock())
        except TimeoutError:
            return ("", True) if may_cancel else (f"timeout: no end within {self._timeout_s:g} s", False)
        except HttpError as exc:
            return f"{exc.kind}: {exc}", False
        except (ValueError, TypeError, AttributeError) as exc:  # JSON of another shape, at the very end
            return f"bad_answer: {exc}", False
        return _refusal(reply) or answer.failure(), False


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
