"""One request on its way through its workers: choose, submit, hand tokens over, and try again where something fails.

    choose ─► book ─► Submit ─► tokens ─► finished
      ▲                            └─ failure ─┬─ Retarget(D2): the KV stays, sent tokens stay
      └── Abort, next attempt, other workers ──┼─ nothing was sent to the client yet
                                               └─ raise: 4xx, budget or attempts spent, or a byte was sent

Only the router opens attempts: their numbers rise by one, whether the prompt is submitted again or only retargeted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.config import ServeConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.calls import WorkerCalls
from services.router.exchange import Exchange, Failure
from services.router.fabric import FabricMeter
from services.router.links import RouterIdentity
from services.router.plan import Named, Plan, deadline_s, name_prompt, plan, plan_reader, reader, to_proto
from services.router.switchboard import Switchboard
from services.router.timeline import Timeline
from services.router.types import RouterRequest, TokenEvent
from services.router.view import RETRY_AFTER_S, View
from services.telemetry.metrics import RouterMetrics

_log = logging.getLogger("pdray.router.flow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """What every run shares."""

    config: ServeConfig
    identity: RouterIdentity
    view: View
    calls: Callable[[str], WorkerCalls | None]
    switchboard: Switchboard
    fabric: FabricMeter
    metrics: RouterMetrics
    clock: Callable[[], float]
    next_turn: Callable[[], int]


class Run:
    """Begin once, take events until it `is_finished` or an error is raised, and close in any case."""

    def __init__(self, deps: Deps, request: RouterRequest, sampling: worker_pb2.Sampling, timeline: Timeline) -> None:
        self._deps = deps
        self._request = request
        self._sampling = sampling
        self._timeline = timeline
        self._deadline_s = deadline_s(request, deps.config.budget)
        self._exchange = Exchange(
            request_id=request.request_id,
            max_tokens=request.sampling.max_tokens,
            num_choices=request.n,
            prompt_ids=() if request.sampling.shaping.prompt_tops is None else request.prompt_ids,
            timeline=timeline,
            clock=deps.clock,
            on_first_token=lambda: deps.view.bookings.prefill_done(request.request_id),
        )
        self._named: Named | None = None
        self._avoid: set[str] = set()
        self._told: dict[str, int] = {}  # worker id -> highest attempt it may know of
        self.is_finished = False  # the end of every choice was given out

    async def begin(self) -> None:
        """Choose workers and submit. Raises RequestError."""
        self._deps.switchboard.add(self._exchange)
        await self._submit_somewhere(None)

    async def next_event(self) -> TokenEvent:
        """The next tokens; waits for them. Raises RequestError."""
        x = self._exchange
        while True:
            failure = x.failure
            choice = x.next_choice()
            if failure is not None and (choice is None or x.taken == 0):
                await self._recover(failure)
                continue
            if choice is not None:
                return self._event(choice)
            limit_s, error = self._limit()
            if self._deps.clock() >= limit_s:
                raise error
            await x.wait(limit_s - self._deps.clock())

    def close(self, reason: str) -> None:
        """Free what the request holds; workers that may still work on it are told, in the background."""
        deps = self._deps
        deps.switchboard.remove(self._request.request_id)
        deps.view.bookings.release(self._request.request_id)
        if not self.is_finished:
            self._abort_all(reason)

    def end_choice(self, choice: int) -> None:
        """The client wants no more of this choice, but of others."""
        self._exchange.lanes[choice].close()
        for worker_id, attempt in self._told.items():
            self._deps.switchboard.drop_choice(worker_id, self._request.request_id, attempt, choice)

    # --- waiting ---

    def _event(self, choice: int) -> TokenEvent:
        x, now = self._exchange, self._deps.clock()
        lane = x.lanes[choice]
        if lane.taken:
            self._deps.metrics.itl_s.observe(now - lane.taken_s)
        is_first = x.taken == 0
        tokens, logprobs = lane.take(now)
        self.is_finished = x.is_finished and x.next_choice() is None
        self._timeline.output_tokens = x.taken
        self._timeline.longest_choice_tokens = max(other.taken for other in x.lanes)
        return TokenEvent(
            token_ids=tokens,
            finish_reason=lane.finish_reason,
            cached_tokens=x.cached_tokens,
            choice=choice,
            logprobs=logprobs,
            prompt_logprobs=tuple(x.prompt_logprobs) if is_first else (),
        )

    def _limit(self) -> tuple[float, RequestError]:
        """When waiting ends, and what it ends with."""
        budget, x = self._deps.config.budget, self._exchange
        if x.taken:
            first = (x.last_token_s + budget.idle_s, f"no token came for {budget.idle_s:g} s (budget.idle_s)")
        else:
            limit_s = self._request.received_s + budget.first_token_s
            first = (limit_s, f"no token came within {budget.first_token_s:g} s (budget.first_token_s)")
        whole = (self._deadline_s, f"the request's {self._whole_budget_s():g} s are spent (budget.total_s)")
        limit_s, message = min(first, whole)
        return limit_s, RequestError(ErrorCode.DEADLINE_EXCEEDED, message)

    def _whole_budget_s(self) -> float:
        return self._deadline_s - self._request.received_s

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_s - self._deps.clock())

    # --- attempts ---

    async def _submit_somewhere(self, failure: Failure | None) -> None:
        """New attempts until one is accepted. Raises RequestError."""
        while True:
            chosen = self._choose(failure)
            try:
                await self._submit(chosen)
                return
            except RequestError as error:
                if error.code is ErrorCode.WORKER_LOST:  # it may have arrived; any other answer is a plain refusal
                    self._abort_all("the answer to Submit is lost")
                self._told.clear()
                failure = Failure(
                    error=error, retryable=error.status.retryable, culprits=frozenset({chosen.prefill_id})
                )
            self._check_retry(failure)

    def _choose(self, failure: Failure | None) -> Plan:
        """Raises RequestError: the failure's own where only workers are left that caused it."""
        deps = self._deps
        if error := deps.view.no_pair():
            raise _with_retry_after(failure.error) if failure is not None else error
        named = self._name()
        policy = (deps.config.router.policy, deps.next_turn())
        found = plan(named, deps.view, deps.fabric, policy, self._avoid)
        if found is None and failure is not None and failure.error.code is ErrorCode.TRANSFER_FAILED:
            found = plan(named, deps.view, deps.fabric, policy, ())  # nothing else is there: once more the same way
        if found is None:
            raise _with_retry_after(failure.error) if failure is not None else _nobody()
        return found

    async def _submit(self, chosen: Plan) -> None:
        """Raises RequestError."""
        deps, x, named = self._deps, self._exchange, self._name()
        attempt = x.attempt + 1
        x.begin(attempt, chosen.prefill_id, chosen.decode_id)
        self._told |= dict.fromkeys((w for w in (chosen.prefill_id, chosen.decode_id) if w), attempt)
        self._timeline.begin_attempt(attempt, "submit", (chosen.prefill_id, chosen.decode_id), chosen.explain())
        deps.view.bookings.book(self._request.request_id, chosen.booking)
        deps.view.routed({w for w in (chosen.prefill_id, chosen.decode_id) if w}, named.names)
        deps.metrics.predicted_s.observe(chosen.decision.choice.terms.cost_ms / 1000)
        calls = deps.calls(chosen.prefill_id)
        target = reader(deps.view, chosen.decode_id) if chosen.decode_id else None
        if calls is None or (target is None and chosen.decode_id):
            raise RequestError(ErrorCode.WORKER_LOST, f"{chosen.prefill_id} or {chosen.decode_id} has just left")
        message = to_proto(named, deps.identity, attempt, self._sampling)
        message.remaining_ms = int(self._remaining_s() * 1000)
        await calls.submit(worker_pb2.SubmitRequest(request=message, reader=target), self._remaining_s())

    async def _recover(self, failure: Failure) -> None:
        """Retarget or try again, else raise the failure's error."""
        x = self._exchange
        if failure.is_differing:
            self._deps.metrics.duplicates_differing.inc()
        self._timeline.note("failed", attempt=x.attempt, code=str(failure.error.code), message=failure.error.message)
        self._avoid |= failure.culprits
        if failure.can_retarget and self._may_try(failure) and await self._retarget(failure):
            return
        if x.taken:
            raise failure.error
        self._check_retry(failure)
        self._abort_all(failure.error.message)
        await self._submit_somewhere(failure)

    async def _retarget(self, failure: Failure) -> bool:
        """Hand the same KV to another decode worker; False where there is none, or the writer cannot."""
        deps, x, named = self._deps, self._exchange, self._name()
        booking = plan_reader(named, deps.view, x.prefill_id, self._avoid)
        if booking is None and failure.error.code is ErrorCode.TRANSFER_FAILED:
            booking = plan_reader(named, deps.view, x.prefill_id, ())  # the same reader, with a new ticket
        calls = deps.calls(x.prefill_id)
        target = reader(deps.view, booking.decode_id) if booking else None
        if booking is None or calls is None or target is None:
            return False
        old, attempt = x.decode_id, x.attempt + 1
        x.retarget(attempt, booking.decode_id)
        deps.switchboard.abort([old], self._request.request_id, attempt - 1, "the hand-off goes to another worker")
        self._told.pop(old, None)
        self._told |= {x.prefill_id: attempt, booking.decode_id: attempt}
        deps.metrics.retargets.inc()
        self._timeline.begin_attempt(attempt, "retarget", (x.prefill_id, booking.decode_id), {})
        deps.view.bookings.book(self._request.request_id, replace(booking, prefill_id=x.prefill_id))
        request = worker_pb2.RetargetRequest(
            request_id=self._request.request_id,
            attempt=attempt,
            reader=target,
            remaining_ms=int(self._remaining_s() * 1000),
        )
        try:
            await calls.retarget(request, self._remaining_s())
        except RequestError as error:
            _log.info("%s did not retarget %s: %s", x.prefill_id, self._request.request_id, error.message)
            self._avoid.add(x.prefill_id)
            return False
        return True

    def _check_retry(self, failure: Failure) -> None:
        """Raise the failure's error unless another attempt is allowed; counts the attempt."""
        if not self._may_try(failure):
            raise _with_retry_after(failure.error)
        self._avoid |= failure.culprits
        self._deps.metrics.retries.labels(str(failure.error.code)).inc()

    def _may_try(self, failure: Failure) -> bool:
        attempts_left = self._exchange.attempt < self._deps.config.router.max_attempts
        return failure.retryable and attempts_left and self._deps.clock() < self._limit()[0]

    def _abort_all(self, reason: str) -> None:
        """Whoever may know of this request is told, once, that it is over."""
        for worker_id, attempt in self._told.items():
            self._deps.switchboard.abort([worker_id], self._request.request_id, attempt, reason)
        self._told.clear()

    def _name(self) -> Named:
        kind = self._deps.view.kind()
        if kind is None:
            raise _nobody()
        if self._named is None or self._named.kind != kind:
            self._named = name_prompt(self._request, kind)
        return self._named


def _nobody() -> RequestError:
    return RequestError(ErrorCode.NO_WORKERS, "no worker is ready to take the request", retry_after_s=RETRY_AFTER_S)


def _with_retry_after(error: RequestError) -> RequestError:
    """An overload always says when to come back."""
    if error.code is ErrorCode.OVERLOADED and error.retry_after_s is None:
        error.retry_after_s = RETRY_AFTER_S
    return error
