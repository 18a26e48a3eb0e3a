"""One request on its way through its workers: attempts on one side, tokens handed over on the other.

begin ─► Attempts ─► tokens ─► Exchange ─► next_event ─► finished
            ▲                     └─ failure ─┐
            └───────── recover ───────────────┘
"""

from __future__ import annotations

from services.protocol.proto import worker_pb2
from services.router.attempts import Attempts
from services.router.deps import Deps
from services.router.exchange import Exchange
from services.router.timeline import Timeline
from services.router.types import RouterRequest, TokenEvent


class Run:
    """Begin once, take events until it `is_finished` or an error is raised, and close in any case."""

    def __init__(self, deps: Deps, request: RouterRequest, sampling: worker_pb2.Sampling, timeline: Timeline) -> None:
        self._deps = deps
        self._request = request
        self._timeline = timeline
        self._exchange = Exchange(
            request_id=request.request_id,
            max_tokens=request.sampling.max_tokens,
            num_choices=request.n,
            prompt_ids=() if request.sampling.shaping.prompt_tops is None else request.prompt_ids,
            timeline=timeline,
            clock=deps.clock,
            on_first_token=self._on_first_token,
        )
        self._attempts = Attempts(deps, request, sampling, timeline, self._exchange)
        self._praised = 0  # the last attempt whose workers were
        self.is_finished = False  # the end of every choice was given out

    async def begin(self) -> None:
        """Choose workers and submit. Raises RequestError."""
        self._deps.switchboard.add(self._exchange)
        await self._attempts.begin()

    async def next_event(self) -> TokenEvent:
        """The next tokens; waits for them. Raises RequestError.

        What has come is given out before a failure is looked at, but for the first byte: until then the request can
        still end with a status.
        """
        x = self._exchange
        while True:
            failure = x.failure
            choice = x.next_choice()
            if failure is not None and (choice is None or x.taken == 0):
                await self._attempts.recover(failure)
                continue
            if choice is not None:
                return self._event(choice)
            limit_s, error = self._attempts.limit()
            if self._deps.clock() >= limit_s:
                raise error
            await x.wait(limit_s - self._deps.clock())

    def close(self, reason: str) -> None:
        """Free what the request holds; workers that may still work on it are told, in the background."""
        deps = self._deps
        deps.switchboard.remove(self._request.request_id)
        deps.view.bookings.release(self._request.request_id)
        deps.gate.left(self._request, self._exchange.taken, is_finished=self.is_finished)
        if self.is_finished:
            self._attempts.remember()
        else:
            self._attempts.abort_all(reason)

    def end_choice(self, choice: int) -> None:
        """The client wants no more of this choice, but of others."""
        self._exchange.lanes[choice].close()
        self._attempts.drop_choice(choice)

    def _on_first_token(self) -> None:
        """Of each attempt: its prompt is computed."""
        self._deps.view.bookings.prefill_done(self._request.request_id)
        self._deps.gate.computed(self._request.request_id)

    def _praise(self) -> None:
        """Once for each attempt: its workers did what they were asked, the hand-off too.

        A decode worker that computed a prompt itself has shown nothing of what it is there for.
        """
        x, entry = self._exchange, self._deps.view.entry(self._exchange.prefill_id)
        if self._praised != x.attempt and (x.committed or not x.decode_id or x.is_finished):
            self._praised = x.attempt
            if entry is not None and entry.role != "decode":
                self._deps.health.succeeded(x.prefill_id, x.decode_id if x.committed else "")

    def _event(self, choice: int) -> TokenEvent:
        x, now = self._exchange, self._deps.clock()
        lane = x.lanes[choice]
        if lane.taken:
            self._deps.metrics.itl_s.observe(now - lane.taken_s)
        is_first = x.taken == 0
        tokens, logprobs = lane.take(now)
        self.is_finished = x.is_finished and x.next_choice() is None
        self._praise()
        self._timeline.output_tokens = x.taken
        self._timeline.longest_choice_tokens = max(other.taken for other in x.lanes)
        return TokenEvent(
            token_ids=tokens,
            finish_reason=lane.finish_reason,
            cached_tokens=x.cached_tokens,
            choice=choice,
            logprobs=logprobs,
            prompt_logprobs=tuple(x.prompt_logprobs) if is_first else (),
            pooled=x.pooled,
        )
