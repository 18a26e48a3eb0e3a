"""One answer on its way: token events of the flow in, text deltas out, cut at its stop strings and counted.

    Flow.stream ─TokenEvent─► AnswerText (detokenize, stop strings) ─Delta─► a front
         ▲                                 │
         └──── closed at a stop string ◄───┘

Streamed and whole answers are made of the same deltas, so their texts are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate

from services.protocol.errors import ErrorCode, RequestError
from services.router.detokenize import Detokenizer
from services.router.logprobs import Told
from services.router.stops import StopMatcher
from services.router.tools.parsers import CallDelta, CallParser, CallReading, Parsed
from services.router.types import FIRST_BYTE, RouterRequest, TimelineMarks, TokenEvent, TokenFlow, TokenLogprobs

OK = "ok"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: text that can go out, and every id counted. Only the last one of a choice has a finish_reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # "" | stop | length | tool_calls
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where they were asked for
    told: tuple[Told, ...] = ()  # the same with the place in the text; end tokens are left out
    calls: tuple[CallDelta, ...] = ()  # of functions, where the request offers some; their text is not in ``text``
    stop: str | int | None = None  # the stop text or stop token id that ended the choice, where one of them did


class AnswerText:
    """Turns the ids of one choice into text; pure but for its own state."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        end_ids: frozenset[int],
        stop_ids: frozenset[int] = frozenset(),
        calls: CallReading | None = None,
    ) -> None:
        """``min_tokens``: text of so many first tokens is never searched for ``stops``. ``end_ids``: have no text.
        ``stop_ids``: those of them that the request names. ``calls``: how calls of functions are found.
        """
        self._stop_ids = stop_ids
        self._parser = None if calls is None else calls.parser
        self._marks: Mapping[int, str] = {} if calls is None else calls.marks
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._end_ids = end_ids
        self.completion_tokens = 0
        self._chars = 0  # of the text so far, held back or not

    def push(self, event: TokenEvent) -> Delta:
        """The event as text. A stop string ends the choice here; ids of the event past it are not counted."""
        delta = self._as_text(event)
        return delta if self._parser is None else self._with_calls(self._parser, delta)

    def _with_calls(self, parser: CallParser, delta: Delta) -> Delta:
        """The same with calls taken out of its text. The last call that may be ends the choice."""
        found = parser.push(delta.text)
        reason = delta.finish_reason
        if reason or parser.is_over:
            rest = parser.flush()
            found = Parsed(found.text + rest.text, found.calls + rest.calls)
            reason = "tool_calls" if parser.has_called and reason != "length" else reason
        return replace(delta, text=found.text, calls=found.calls, finish_reason=reason)

    def _as_text(self, event: TokenEvent) -> Delta:
        out: list[str] = []
        told: list[Told] = []
        for taken, token_id in enumerate(event.token_ids, 1):
            self.completion_tokens += 1
            is_end = token_id in self._end_ids
            if event.logprobs and not is_end:
                told.append(Told(token_id, self._chars, event.logprobs[taken - 1]))
            text = "" if is_end else self._marks.get(token_id) or self._detokenizer.push(token_id)
            self._chars += len(text)
            out.append(self._searched(text))
            if self._matcher.matched is not None:
                return Delta(
                    "".join(out),
                    event.token_ids[:taken],
                    "stop",
                    event.choice,
                    event.logprobs[:taken],
                    tuple(told),
                    stop=self._matcher.matched,
                )
        if not event.finish_reason:
            return Delta("".join(out), event.token_ids, "", event.choice, event.logprobs, tuple(told))
        out.append(self._searched(self._detokenizer.flush()))
        out.append(self._matcher.flush())
        reason = "stop" if self._matcher.matched else event.finish_reason
        return Delta(
            "".join(out),
            event.token_ids,
            reason,
            event.choice,
            event.logprobs,
            tuple(told),
            stop=self._matcher.matched or self._stop_token(event),
        )

    def _stop_token(self, event: TokenEvent) -> int | None:
        """The request's own stop token that ended the choice."""
        last = event.token_ids[-1] if event.token_ids else None
        return last if event.finish_reason == "stop" and last in self._stop_ids else None

    def _searched(self, text: str) -> str:
        return text if self.completion_tokens <= self._min_tokens else self._matcher.push(text)


class Answer:
    """What one prompt is answered with, in one choice or several. Whoever holds it ends it with `close`, after the last
    byte is out."""

    def __init__(
        self,
        index: int,
        flow: TokenFlow,
        request: RouterRequest,
        texts: Sequence[AnswerText],
        timeline: TimelineMarks,
    ) -> None:
        """``texts``: one for each choice."""
        self.index = index  # of the prompt
        self.request = request
        self.echoed = ""  # text of the prompt, where the answer begins with it
        self.echoed_chars: tuple[int, ...] = ()  # of each of its tokens, where their logprobs are told
        self.with_token_ids = False  # ids are told beside the text
        self.is_begun = False  # a stream of it has sent its first event
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the second token on, where they were asked for
        self._flow = flow
        self._texts = texts
        self._open = set(range(len(texts)))
        self._timeline = timeline
        self._outcome = CANCELLED

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(text.completion_tokens for text in self._texts)

    @property
    def num_choices(self) -> int:
        return len(self._texts)

    @property
    def is_complete(self) -> bool:
        """The end of every choice has been given out."""
        return not self._open

    def index_of(self, delta: Delta) -> int:
        """Of its choice among those of all prompts."""
        return self.index * self.num_choices + delta.choice

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; of each choice at least one delta, which may be empty.

        Raises:
            RequestError: before the first delta or later; nothing follows.
        """
        if self.request.sampling.max_tokens == 0:  # echo alone: nothing to compute, but logprobs of the prompt
            if self.request.sampling.shaping.prompt_tops is not None:
                await self._tell_prompt()
            self._outcome = OK
            for choice in sorted(self._open):
                self._open.discard(choice)
                yield Delta("", (), "length", choice)
            return
        self._outcome = str(ErrorCode.INTERNAL)  # until it is known better
        try:
            async with aclosing(self._flow.stream(self.request)) as events:
                async for event in events:
                    if event.choice not in self._open:
                        continue
                    delta = self._take(event)
                    yield delta
                    if self.is_complete and not event.finish_reason:
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

    async def _tell_prompt(self) -> None:
        """Compute the prompt for its logprobs alone; the token that comes with them is dropped."""
        sampling = replace(self.request.sampling, max_tokens=1, min_tokens=0)
        async with aclosing(self._flow.stream(replace(self.request, sampling=sampling, n=1))) as events:
            async for event in events:
                self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)

    def told_prompt(self) -> tuple[Told, ...]:
        """The prompt's tokens as an answer that begins with them tells them; known once the first delta is here."""
        if self.request.sampling.shaping.echo_logprobs is None:
            return ()
        offsets = accumulate(self.echoed_chars, initial=-len(self.echoed))
        told = zip(self.request.prompt_ids, offsets, (None, *self.prompt_logprobs), strict=False)
        return tuple(Told(*x) for x in told)

    def _take(self, event: TokenEvent) -> Delta:
        """A choice that ends with a stop string is not computed further; the others go on."""
        delta = self._texts[event.choice].push(event)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if delta.finish_reason:
            self._open.discard(event.choice)
            if self.is_complete:
                self._outcome = OK
            elif not event.finish_reason:
                self._flow.end_choice(self.request.request_id, event.choice)
        return delta

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
            for task, i in sorted(((task, waiting[task]) for task in done), key=lambda item: item[1]):
                del waiting[task]  # not before: where this one raises, the finally takes the others' results
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
