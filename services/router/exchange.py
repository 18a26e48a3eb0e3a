"""One request's mailbox: what its workers send, put in order, until the flow takes it.

    attempt ─► tokens by choice and position ─► finished (stop | length), each choice by itself
       ▲            └─ failure ─► the flow: retarget, or a new attempt that goes on behind the tokens that are here ─┐
       └─────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Each position of a choice is taken once, whichever attempt it comes from. The buffer is bounded by the request's
max_tokens, so Attach is drained however slow the client is. Only the event loop touches it; nothing here waits but
`wait`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from services.protocol.errors import STATUS, ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.timeline import COMMITTED, Timeline
from services.router.types import TokenLogprobs

FINISHED = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt is over, and what may still be tried."""

    error: RequestError
    retryable: bool
    culprits: frozenset[str]  # worker ids that another attempt should avoid
    can_retarget: bool = False  # the prefill worker lives and holds the KV
    is_differing: bool = False  # two workers disagreed on a token


@dataclass(slots=True)
class Lane:
    """One choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the same tokens, where they were asked for
    taken: int = 0  # tokens given to the client
    taken_s: float = 0.0  # when the latest were
    finish_reason: str = ""
    is_closed: bool = False  # its end was given to the client, or the client wants no more of it

    @property
    def has_news(self) -> bool:
        return not self.is_closed and (self.taken < len(self.tokens) or bool(self.finish_reason))

    @property
    def is_over(self) -> bool:
        return self.is_closed or bool(self.finish_reason)

    def take(self, now_s: float) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Tokens that have come since the last call, and their logprobs."""
        new = tuple(self.tokens[self.taken :]), tuple(self.logprobs[self.taken :])
        self.taken, self.taken_s = len(self.tokens), now_s
        self.is_closed = bool(self.finish_reason)
        return new

    def close(self) -> None:
        """What still comes of it is ignored."""
        self.is_closed = True


@dataclass(slots=True)
class Exchange:
    """Messages of one request. ``clock`` is monotonic seconds."""

    request_id: str
    max_tokens: int
    timeline: Timeline
    clock: Callable[[], float]
    num_choices: int = 1
    prompt_ids: tuple[int, ...] = ()  # where its logprobs are wanted: nothing is given out before all of them are here
    on_first_token: Callable[[], None] = lambda: None  # of each attempt
    attempt: int = 0
    prefill_id: str = ""
    decode_id: str = ""  # "" where one worker does all
    committed: bool = False  # the decode worker has the KV; the prefill worker is not needed any more
    lanes: list[Lane] = field(init=False)  # of each choice
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on
    failure: Failure | None = None
    cached_tokens: int = 0
    pooled: bytes = b""
    last_token_s: float = 0.0
    _is_computed: bool = False  # the prefill worker of this attempt has given a token
    _is_resumed: bool = False  # this attempt goes on behind tokens of earlier ones
    _accepted: dict[str, set[int]] = field(default_factory=dict)  # worker id -> attempts whose messages count
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.lanes = [Lane() for _ in range(self.num_choices)]

    # --- the flow ---

    def begin(self, attempt: int, prefill_id: str, decode_id: str) -> None:
        """A new attempt, for what has not come yet; no message of an earlier one counts any more."""
        self.attempt, self.prefill_id, self.decode_id = attempt, prefill_id, decode_id
        self._accepted = {w: {attempt} for w in (prefill_id, decode_id) if w}
        self._is_computed = self.committed = False
        self._is_resumed = bool(self.outputs)
        self.failure = None

    def retarget(self, attempt: int, decode_id: str) -> None:
        """The same KV goes to another decode worker; what the prefill worker sent or still sends counts."""
        self._accepted.pop(self.decode_id, None)
        self.attempt, self.decode_id = attempt, decode_id
        self._accepted[self.prefill_id].add(attempt)
        self._accepted[decode_id] = {attempt}
        self.failure = None

    @property
    def taken(self) -> int:
        """Tokens of all choices given to the client."""
        return sum(lane.taken for lane in self.lanes)

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """What has come of each choice that goes on; empty before the first token of any."""
        going_on = {i: tuple(lane.tokens) for i, lane in enumerate(self.lanes) if not lane.is_over}
        return going_on if any(lane.tokens for lane in self.lanes) else {}

    @property
    def has_prompt_logprobs(self) -> bool:
        """They were asked for, and all of them are here."""
        return bool(self.prompt_ids) and not self._lacks_prompt

    @property
    def is_finished(self) -> bool:
        return all(lane.is_over for lane in self.lanes)

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.is_finished

    def next_choice(self) -> int | None:
        """Of the choices with something new the one that was taken from longest ago; None where nothing is new."""
        if self._lacks_prompt:
            return None
        news = (i for i, lane in enumerate(self.lanes) if lane.has_news)
        return min(news, key=lambda i: self.lanes[i].taken_s, default=None)

    async def wait(self, timeout_s: float) -> None:
        """Return when something new is there, or after the time."""
        if self.next_choice() is None and self.failure is None and not (self.is_finished and not self._lacks_prompt):
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._wake.wait()

    # --- the workers ---

    def accepts(self, worker_id: str, attempt: int) -> bool:
        return attempt in self._accepted.get(worker_id, ())

    def on_output(self, worker_id: str, output: worker_pb2.Output) -> None:
        """An output that `accepts` let in."""
        if output.prompt_logprobs:
            self._put_prompt(worker_id, output)
            return
        if self.is_over:
            return
        if output.finish_reason == "error":
            self._on_error(worker_id, output.error)
            return
        if output.choice >= self.num_choices:
            self._fail(ErrorCode.INTERNAL, f"choice {output.choice} of {self.num_choices} came", worker_id)
            self._wake.set()
            return
        if (output.token_ids or output.pooled) and worker_id == self.prefill_id and not self._is_computed:
            self._is_computed = True
            self.pooled = output.pooled
            self.on_first_token()
            if not self._is_resumed:
                self.cached_tokens = output.cached_tokens
                self.timeline.first_token_times(output.attempt, output.times, output.cached_tokens)
        if worker_id == self.decode_id:
            self.committed = True
            if output.HasField("times"):
                self.timeline.decode_times(output.times)
        lane = self.lanes[output.choice]
        if not lane.is_over and self._put(lane, output) and output.finish_reason:
            if output.finish_reason in FINISHED and output.position + len(output.token_ids) == len(lane.tokens):
                lane.finish_reason = output.finish_reason
            else:
                text = (
                    f"{worker_id} ended with {output.finish_reason!r} at {output.position} of {len(lane.tokens)} tokens"
                )
                self._fail(ErrorCode.INTERNAL, text, worker_id)
        self._wake.set()

    def on_handoff(self, report: worker_pb2.HandoffReport) -> None:
        """The prefill worker's report about the current attempt; reports of earlier ones change nothing."""
        if self.is_over or report.attempt != self.attempt:
            return
        if report.state == COMMITTED:
            self.committed = True
            return
        code = _code(report.error.code, ErrorCode.TRANSFER_FAILED)
        retryable = report.error.retryable or STATUS[code].retryable
        self.failure = Failure(
            error=RequestError(code, report.error.message or "the hand-off failed"),
            retryable=retryable,
            culprits=frozenset({self.decode_id}),
            can_retarget=retryable,
        )
        self._wake.set()

    def on_worker_lost(self, worker_id: str, error: RequestError) -> None:
        """The worker is gone, came back as another process, or stalls."""
        if self.is_over or worker_id not in self._accepted:
            return
        if worker_id == self.prefill_id and self.committed and self.decode_id:
            return
        before_commit = worker_id == self.decode_id and not self.committed
        self.failure = Failure(error=error, retryable=True, culprits=frozenset({worker_id}), can_retarget=before_commit)
        self._wake.set()

    def _on_error(self, worker_id: str, error: worker_pb2.Error) -> None:
        code = _code(error.code, ErrorCode.INTERNAL)
        retryable = error.retryable or STATUS[code].retryable
        self.failure = Failure(
            error=RequestError(code, error.message or f"{worker_id} failed"),
            retryable=retryable,
            culprits=frozenset({worker_id}),
            can_retarget=retryable and worker_id == self.decode_id and not self.committed,
        )
        self._wake.set()

    @property
    def _lacks_prompt(self) -> bool:
        return len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    def _put_prompt(self, worker_id: str, output: worker_pb2.Output) -> None:
        """A piece of the prompt's logprobs; what a recomputed prompt brings again is left aside."""
        if self.failure is not None or worker_id != self.prefill_id:
            return
        known = self.prompt_logprobs
        for index, told in enumerate(output.prompt_logprobs, start=output.prompt_start):
            if index == len(known) + 1 < len(self.prompt_ids):
                known.append(_logprobs(self.prompt_ids[index], told))
        self._wake.set()

    def _put(self, lane: Lane, output: worker_pb2.Output) -> bool:
        """Take each position once. False where that cannot be done; the failure says why."""
        tokens = lane.tokens
        if output.position > len(tokens):
            text = f"output {output.position} came where {len(tokens)} was due"
            self._fail(ErrorCode.INTERNAL, text, *self._accepted)
            return False
        for index, token in enumerate(output.token_ids, start=output.position):
            if index == len(tokens):
                tokens.append(token)
                if output.logprobs:
                    lane.logprobs.append(_logprobs(token, output.logprobs[index - output.position]))
                self.last_token_s = self.clock()
            elif tokens[index] != token:
                text = f"two workers disagree on token {index}: {tokens[index]} and {token}"
                self._fail(ErrorCode.INTERNAL, text, *self._accepted, is_differing=True)
                return False
        if len(tokens) > self.max_tokens:
            self._fail(ErrorCode.INTERNAL, f"more than max_tokens ({self.max_tokens}) tokens came", *self._accepted)
            return False
        return True

    def _fail(self, code: ErrorCode, message: str, *culprits: str, is_differing: bool = False) -> None:
        self.failure = Failure(
            error=RequestError(code, message),
            retryable=False,
            culprits=frozenset(culprits),
            is_differing=is_differing,
        )


def _logprobs(token_id: int, told: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token_id, told.logprob, told.rank, tuple(zip(told.top_ids, told.top_logprobs, strict=True)))


def _code(code: str, fallback: ErrorCode) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return fallback
