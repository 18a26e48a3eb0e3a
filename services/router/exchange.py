"""One request's mailbox: what its workers send, put in order, until the flow takes it.

    attempt ─► tokens by position ─► finished (stop | length)
       ▲            └─ failure ─► the flow: retarget (tokens stay) or a new attempt (unsent tokens go) ─┐
       └────────────────────────────────────────────────────────────────────────────────────────────────┘

Each position is taken once. The buffer is bounded by the request's max_tokens, so Attach is drained however slow the
client is. Only the event loop touches it; nothing here waits but `wait`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from services.protocol.errors import STATUS, ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.timeline import COMMITTED, Timeline

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
class Exchange:
    """Messages of one request. ``clock`` is monotonic seconds."""

    request_id: str
    max_tokens: int
    timeline: Timeline
    clock: Callable[[], float]
    on_first_token: Callable[[], None] = lambda: None
    attempt: int = 0
    prefill_id: str = ""
    decode_id: str = ""  # "" where one worker does all
    committed: bool = False  # the decode worker has the KV; the prefill worker is not needed any more
    tokens: list[int] = field(default_factory=list)
    taken: int = 0  # tokens given to the client
    finish_reason: str = ""
    failure: Failure | None = None
    cached_tokens: int = 0
    last_token_s: float = 0.0
    _accepted: dict[str, set[int]] = field(default_factory=dict)  # worker id -> attempts whose messages count
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    # --- the flow ---

    def begin(self, attempt: int, prefill_id: str, decode_id: str) -> None:
        """A new attempt. Only while nothing was taken: unsent tokens of the attempt before are dropped."""
        assert self.taken == 0
        self.attempt, self.prefill_id, self.decode_id = attempt, prefill_id, decode_id
        self._accepted = {w: {attempt} for w in (prefill_id, decode_id) if w}
        self.tokens.clear()
        self.committed, self.finish_reason, self.failure = False, "", None

    def retarget(self, attempt: int, decode_id: str) -> None:
        """The same KV goes to another decode worker; what the prefill worker sent or still sends counts."""
        self._accepted.pop(self.decode_id, None)
        self.attempt, self.decode_id = attempt, decode_id
        self._accepted[self.prefill_id].add(attempt)
        self._accepted[decode_id] = {attempt}
        self.failure = None

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.failure is not None

    def take(self) -> tuple[int, ...]:
        """Tokens that have come since the last call."""
        new = tuple(self.tokens[self.taken :])
        self.taken = len(self.tokens)
        return new

    async def wait(self, timeout_s: float) -> None:
        """Return when something new is there, or after the time."""
        if len(self.tokens) == self.taken and not self.is_over:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._wake.wait()

    # --- the workers ---

    def accepts(self, worker_id: str, attempt: int) -> bool:
        return attempt in self._accepted.get(worker_id, ())

    def on_output(self, worker_id: str, output: worker_pb2.Output) -> None:
        """An output that `accepts` let in."""
        if self.is_over:
            return
        if output.finish_reason == "error":
            self._on_error(worker_id, output.error)
            return
        if output.position == 0 and output.token_ids and worker_id == self.prefill_id:
            self.cached_tokens = output.cached_tokens
            self.timeline.first_token_times(output.attempt, output.times, output.cached_tokens)
            self.on_first_token()
        if worker_id == self.decode_id:
            self.committed = True
            if output.HasField("times"):
                self.timeline.decode_times(output.times)
        if self._put(output) and output.finish_reason:
            if output.finish_reason in FINISHED:
                self.finish_reason = output.finish_reason
            else:
                self._fail(ErrorCode.INTERNAL, f"{worker_id} ended with {output.finish_reason!r}", worker_id)
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

    def _put(self, output: worker_pb2.Output) -> bool:
        """Take each position once. False where that cannot be done; the failure says why."""
        if output.position > len(self.tokens):
            text = f"output {output.position} came where {len(self.tokens)} was due"
            self._fail(ErrorCode.INTERNAL, text, *self._accepted)
            return False
        for index, token in enumerate(output.token_ids, start=output.position):
            if index == len(self.tokens):
                self.tokens.append(token)
                self.last_token_s = self.clock()
            elif self.tokens[index] != token:
                text = f"two workers disagree on token {index}: {self.tokens[index]} and {token}"
                self._fail(ErrorCode.INTERNAL, text, *self._accepted, is_differing=True)
                return False
        if len(self.tokens) > self.max_tokens:
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


def _code(code: str, fallback: ErrorCode) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return fallback
