"""The attempts of one request: who computes it, and who goes on where that fails.

    choose ─► book ─► Submit ─► under way ─► failure ─► rungs, from the top ─┬─ Retarget(D2): the KV stays
                ▲                                                            ├─ none is left: the failure's error
                └────────── Abort, attempt + 1, other workers ───────────────┘

Only the router opens attempts: their numbers rise by one, whether the prompt is submitted again or only retargeted. A
new attempt brings along every token that has come, so none is drawn twice. Workers that failed are left out until they
are another process; the same process is asked again only where nobody else came within ``router.rescue_wait_s``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.deps import Deps
from services.router.exchange import Exchange, Failure
from services.router.ladder import Rung, Standing, rungs
from services.router.plan import (
    Named,
    Plan,
    ask,
    deadline_s,
    name_prompt,
    names_after,
    plan,
    plan_here,
    plan_reader,
    reader,
    source,
    to_proto,
    unserved,
)
from services.router.timeline import Timeline
from services.router.types import RouterRequest
from services.router.view import RETRY_AFTER_S

RESCUE_POLL_S = 0.05
_log = logging.getLogger("pdray.router.flow")


class Attempts:
    """Begin once, recover from each failure of the exchange, and `abort_all` at the end unless it came by itself."""

    def __init__(
        self,
        deps: Deps,
        request: RouterRequest,
        sampling: worker_pb2.Sampling,
        timeline: Timeline,
        exchange: Exchange,
    ) -> None:
        self._deps = deps
        self._request = request
        self._sampling = sampling
        self._timeline = timeline
        self._exchange = exchange
        self._deadline_s = deadline_s(request, deps.config.budget)
        self._named: Named | None = None
        self._avoid: dict[str, str] = {}  # worker id -> epoch of the process that failed
        self._told: dict[str, int] = {}  # worker id -> highest attempt it may know of
        self._turn: int | None = None  # the next attempt's, however often its workers are chosen
        self._was_retargeted = False  # since the last Submit, after a failed transfer

    async def begin(self) -> None:
        """Choose workers and submit. Raises RequestError."""
        self._deps.health.judge()
        if error := unserved(self._request, self._deps.view):
            raise error
        chosen = await self._deps.gate.enter(self._request, self._plan, self.limit(), self._timeline)
        if chosen is None:
            raise nobody()
        if failure := await self._submit(chosen, None):
            await self.recover(failure)

    async def recover(self, failure: Failure) -> None:
        """Try what is left until an attempt is under way. Raises RequestError: the failure's own."""
        left: Failure | None = failure
        while left is not None:
            left = await self._climb(left)

    def limit(self) -> tuple[float, RequestError]:
        """When waiting for the next token ends, and what it ends with."""
        budget, x = self._deps.config.budget, self._exchange
        if x.taken:
            first = (x.last_token_s + budget.idle_s, f"no token came for {budget.idle_s:g} s (budget.idle_s)")
        else:
            limit_s = self._request.received_s + budget.first_token_s
            first = (limit_s, f"no token came within {budget.first_token_s:g} s (budget.first_token_s)")
        whole_s = self._deadline_s - self._request.received_s
        whole = (self._deadline_s, f"the request's {whole_s:g} s are spent (budget.total_s)")
        limit_s, message = min(first, whole)
        return limit_s, RequestError(ErrorCode.DEADLINE_EXCEEDED, message)

    def drop_choice(self, choice: int) -> None:
        """Tell who may compute it that one choice is not wanted any more."""
        for worker_id, attempt in self._told.items():
            self._deps.switchboard.drop_choice(worker_id, self._request.request_id, attempt, choice)

    def abort_all(self, reason: str) -> None:
        """Whoever may know of this request is told, once, that it is over."""
        for worker_id, attempt in self._told.items():
            self._deps.switchboard.abort([worker_id], self._request.request_id, attempt, reason)
        self._told.clear()

    def remember(self) -> None:
        """The answer is complete: until their events say so, its blocks count as cached where it was decoded."""
        x = self._exchange
        if self._named is not None and x.num_choices == 1 and not self._request.pools:
            holder = x.decode_id or x.prefill_id
            self._deps.view.routed({holder}, names_after(self._named, x.lanes[0].tokens))

    # --- the ladder ---

    async def _climb(self, failure: Failure) -> Failure | None:
        """One new attempt: None where it is accepted, else its failure. Raises RequestError where nothing is left."""
        x = self._exchange
        if failure.is_differing:
            self._deps.metrics.duplicates_differing.inc()
        self._timeline.note("failed", attempt=x.attempt, code=str(failure.error.code), message=failure.error.message)
        is_pairs = failure.error.code is ErrorCode.TRANSFER_FAILED
        self._deps.health.failed(failure.error.code, {x.prefill_id, x.decode_id} if is_pairs else failure.culprits)
        standing = self._standing(failure)
        if standing.is_kv_failure and standing.was_retargeted:
            self._avoid.clear()  # it was not the readers
            self._leave_out(x.prefill_id)
        else:
            self._leave_out(*failure.culprits)
        for rung in rungs(standing):
            if rung is Rung.RETARGET:
                if await self._retarget(failure):
                    return None
            elif rung is not Rung.FAIL:
                chosen = await self._choose(rung, failure)
                if chosen is not None:
                    self.abort_all(failure.error.message)
                    self._deps.metrics.retries.labels(str(failure.error.code)).inc()
                    return await self._submit(chosen, rung)
        if failure.error.status.http >= 500:
            self._count(Rung.FAIL)
        raise with_retry_after(failure.error)

    def _standing(self, failure: Failure) -> Standing:
        return Standing(
            code=failure.error.code,
            is_retryable=failure.retryable,
            attempts_left=self._attempts_left() if self._deps.clock() < self.limit()[0] else 0,
            policy=self._deps.config.transfer.on_kv_failure,
            can_retarget=failure.can_retarget,
            was_retargeted=self._was_retargeted,
            has_outputs=bool(self._exchange.outputs),
        )

    async def _choose(self, rung: Rung, failure: Failure) -> Plan | None:
        """Workers that can carry this rung, waited for where they were lost; None: there are none."""
        if not self._attempts_left():
            return None
        if rung is Rung.COMPUTE_HERE:
            return self._plan_here()
        is_lost = failure.error.code is ErrorCode.WORKER_LOST
        wait_s = self._deps.config.router.rescue_wait_s if is_lost else 0.0
        until_s = min(self._deps.clock() + wait_s, self.limit()[0])
        while (found := self._plan(self._avoided())) is None and self._deps.clock() < until_s:
            await asyncio.sleep(RESCUE_POLL_S)
        is_last = self._attempts_left() == 1
        if found is None and (is_lost or (failure.error.code is ErrorCode.TRANSFER_FAILED and not is_last)):
            found = self._plan(())  # nobody else is there: once more the same ones
        return found

    def _plan(self, avoid: Collection[str]) -> Plan | None:
        """None: no pair and no mixed worker is there, or none that was not avoided. Raises RequestError NEVER_FITS at
        the first attempt; later ones may be larger than what a prefill worker holds, which is the failure's to tell."""
        deps = self._deps
        if unserved(self._request, deps.view) is not None:
            return None
        try:
            self._turn = deps.next_turn() if self._turn is None else self._turn
            return plan(self._name(), deps.view, deps.fabric, ask(deps.config.router.policy, self._turn), avoid)
        except RequestError:
            if self._exchange.attempt:
                return None
            raise

    def _plan_here(self) -> Plan | None:
        """One worker for everything, if it can be expected to give a token within the budget."""
        deps = self._deps
        if deps.view.kind() is None or self._request.pools:
            return None
        found = plan_here(self._name(), deps.view, deps.fabric, self._avoided())
        late = found is not None and deps.clock() + found.decision.choice.terms.time_ms / 1000 > self.limit()[0]
        return None if late else found

    # --- one attempt ---

    async def _submit(self, chosen: Plan, rung: Rung | None) -> Failure | None:
        """None: it is accepted. ``rung`` None: the first attempt."""
        deps, x, named = self._deps, self._exchange, self._name()
        pair = (chosen.prefill_id, chosen.decode_id)
        x.begin(x.attempt + 1, *pair)
        self._turn = None
        self._was_retargeted = False
        self._told |= dict.fromkeys((w for w in pair if w), x.attempt)
        kind = "submit" if rung in (None, Rung.RETRY) else str(rung)
        self._timeline.begin_attempt(x.attempt, kind, pair, chosen.explain())
        if rung is not None:
            self._count(rung)
        deps.view.bookings.book(self._request.request_id, chosen.booking)
        deps.gate.sent(self._request, chosen.booking, chosen.decision.choice.terms)
        deps.health.sent(*pair)
        deps.view.routed({w for w in pair if w}, named.names)
        try:
            await self._send(chosen, named, rung is Rung.COMPUTE_HERE)
            deps.gate.accepted(self._request.request_id)
        except RequestError as error:
            if error.code is ErrorCode.WORKER_LOST:  # it may have arrived; any other answer is a plain refusal
                self.abort_all("the answer to Submit is lost")
            self._told.clear()
            gone = frozenset(w for w in pair if w and deps.calls(w) is None)
            culprits = gone or frozenset({chosen.prefill_id})
            return Failure(error=error, retryable=error.status.retryable, culprits=culprits)
        return None

    async def _send(self, chosen: Plan, named: Named, compute_here: bool) -> None:
        """Raises RequestError."""
        deps = self._deps
        calls = deps.calls(chosen.prefill_id)
        target = reader(deps.view, chosen.decode_id) if chosen.decode_id else None
        if calls is None or (target is None and chosen.decode_id):
            raise RequestError(ErrorCode.WORKER_LOST, f"{chosen.prefill_id} or {chosen.decode_id} has just left")
        message = to_proto(named, deps.identity, self._exchange.attempt, self._sampling)
        if self._exchange.has_prompt_logprobs:
            message.sampling.ClearField("prompt_logprobs")
        message.remaining_ms = int(self._remaining_s() * 1000)
        holder = None if compute_here else source(deps.view, chosen.decision.choice)
        request = worker_pb2.SubmitRequest(request=message, reader=target, source=holder, compute_here=compute_here)
        await calls.submit(request, self._remaining_s())

    async def _retarget(self, failure: Failure) -> bool:
        """Hand the same KV to another decode worker; False where there is none, or the writer cannot."""
        deps, x, named = self._deps, self._exchange, self._name()
        is_kv_failure = failure.error.code is ErrorCode.TRANSFER_FAILED
        booking = plan_reader(named, deps.view, x.prefill_id, self._avoided())
        if booking is None and is_kv_failure:
            booking = plan_reader(named, deps.view, x.prefill_id, ())  # the same reader, with a new ticket
        calls = deps.calls(x.prefill_id)
        target = reader(deps.view, booking.decode_id) if booking else None
        if booking is None or calls is None or target is None:
            return False
        old, attempt = x.decode_id, x.attempt + 1
        x.retarget(attempt, booking.decode_id)
        self._was_retargeted |= is_kv_failure
        deps.switchboard.abort([old], self._request.request_id, attempt - 1, "the hand-off goes to another worker")
        self._told.pop(old, None)
        self._told |= {x.prefill_id: attempt, booking.decode_id: attempt}
        deps.metrics.retargets.inc()
        self._timeline.begin_attempt(attempt, "retarget", (x.prefill_id, booking.decode_id), {})
        self._count(Rung.RETARGET)
        booking = replace(booking, prefill_id=x.prefill_id)
        deps.view.bookings.book(self._request.request_id, booking)
        deps.gate.sent(self._request, booking)
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
            if error.code is ErrorCode.WORKER_LOST:  # any other refusal: it lives, and has let go of the KV
                self._leave_out(x.prefill_id)
            return False
        return True

    # --- what is known ---

    def _attempts_left(self) -> int:
        return max(0, self._deps.config.router.max_attempts - self._exchange.attempt)

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_s - self._deps.clock())

    def _leave_out(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            if (entry := self._deps.view.entry(worker_id)) is not None:
                self._avoid[worker_id] = entry.epoch

    def _avoided(self) -> tuple[str, ...]:
        """Those that are still the process that failed."""
        entry = self._deps.view.entry
        return tuple(w for w, epoch in self._avoid.items() if (found := entry(w)) is not None and found.epoch == epoch)

    def _count(self, rung: Rung) -> None:
        self._deps.metrics.rungs.labels(str(rung)).inc()
        self._timeline.note("rung", attempt=self._exchange.attempt, rung=str(rung))

    def _name(self) -> Named:
        kind, outputs = self._deps.view.kind(), self._exchange.outputs
        if kind is None:
            raise nobody()
        if self._named is None or self._named.kind != kind or self._named.outputs != outputs:
            self._named = name_prompt(self._request, kind, outputs)
        return self._named


def nobody() -> RequestError:
    return RequestError(ErrorCode.NO_WORKERS, "no worker is ready to take the request", retry_after_s=RETRY_AFTER_S)


def with_retry_after(error: RequestError) -> RequestError:
    """An overload always says when to come back."""
    if error.code is ErrorCode.OVERLOADED and error.retry_after_s is None:
        error.retry_after_s = RETRY_AFTER_S
    return error
