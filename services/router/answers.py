"""One answer on its way: token events of the flow in, text deltas out, cut at its stop strings and counted.

    Flow.stream ─TokenEvent─► AnswerText (detokenize, stop strings) ─Delta─► a front
         ▲                                 │
         └──── closed at a stop string ◄───┘

Streamed and whole answers are made of the same deltas, so their texts are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from services.protocol.errors import ErrorCode, RequestError
from services.router.detokenize import Detokenizer
from services.router.stops import StopMatcher
from services.router.types import FIRST_BYTE, RouterRequest, TimelineMarks, TokenEvent, TokenFlow

OK = "ok"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: text that can go out, and every id counted. Only the last one of an answer has a finish_reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # "" | stop | length


class AnswerText:
    """Turns ids into text; pure but for its own state."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, end_ids: frozenset[int]
    ) -> None:
        """``min_tokens``: text of so many first tokens is never searched for ``stops``. ``end_ids``: have no text."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._end_ids = end_ids
        self.completion_tokens = 0

    def push(self, event: TokenEvent) -> Delta:
        """The event as text. A stop string ends the answer here; ids of the event past it are not counted."""
        out: list[str] = []
        for taken, token_id in enumerate(event.token_ids, 1):
            self.completion_tokens += 1
            text = "" if token_id in self._end_ids else self._detokenizer.push(token_id)
            out.append(self._searched(text))
            if self._matcher.matched is not None:
                return Delta("".join(out), event.token_ids[:taken], "stop")
        if not event.finish_reason:
            return Delta("".join(out), event.token_ids)
        out.append(self._searched(self._detokenizer.flush()))
        out.append(self._matcher.flush())
        return Delta("".join(out), event.token_ids, "stop" if self._matcher.matched else event.finish_reason)

    def _searched(self, text: str) -> str:
        return text if self.completion_tokens <= self._min_tokens else self._matcher.push(text)


class Answer:
    """One sequence of a request. Whoever holds it ends it with `close`, after the last byte is out."""

    def __init__(
        self, index: int, flow: TokenFlow, request: RouterRequest, text: AnswerText, timeline: TimelineMarks
    ) -> None:
        self.index = index
        self.request = request
        self.echoed = ""  # text of the prompt, where the answer begins with it
        self.cached_tokens = 0
        self._flow = flow
        self._text = text
        self._timeline = timeline
        self._outcome = CANCELLED

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        return self._text.completion_tokens

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; at least one delta, which may be empty.

        Raises:
            RequestError: before the first delta or later; nothing follows.
        """
        if self.request.sampling.max_tokens == 0:  # echo alone: nothing to compute
            self._outcome = OK
            yield Delta("", (), "length")
            return
        self._outcome = str(ErrorCode.INTERNAL)  # until it is known better
        try:
            async with aclosing(self._flow.stream(self.request)) as events:
                async for event in events:
                    delta = self._text.push(event)
                    self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
                    if delta.finish_reason:
                        self._outcome = OK
                    yield delta
                    if delta.finish_reason and not event.finish_reason:
                        return  # a stop string: closing the stream tells the workers
            if self._outcome != OK:
                raise RequestError(ErrorCode.INTERNAL, "the answer ended without a finish reason")
        except RequestError as exc:
            self._outcome = str(exc.code)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self._outcome != OK:
                self._outcome = CANCELLED
            raise

    def first_byte(self) -> None:
        """The first token is with the client's socket."""
        self._timeline.mark(FIRST_BYTE)

    def fail(self, code: str) -> None:
        """The answer ends with this error instead, unless it has ended already."""
        if self._outcome == CANCELLED:
            self._outcome = code

    def close(self) -> None:
        """Close the timeline with what became of the answer; without an end it was cancelled. May be called twice."""
        self._timeline.close(self._outcome)


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, Delta], None]:
    """Deltas of all answers as they come. The first error ends all of them."""
    if len(answers) == 1:
        async with aclosing(answers[0].deltas()) as deltas:
            async for delta in deltas:
                yield answers[0], delta
        return
    streams = [answer.deltas() for answer in answers]
    waiting = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task, i in sorted(((task, waiting.pop(task)) for task in done), key=lambda item: item[1]):
                new = task.result()
                if new is not None:
                    yield answers[i], new
                    waiting[asyncio.create_task(_next(streams[i]))] = i
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(stream, None)
