"""The door between the front and the workers: a request goes through when its pair has room, in the queue's order.

    enter ─► plan ─► target out of reach? ─► 503        room at its pair ─► sent ─computed─► ─left─►
                          │ no                               ▲                 │               │
                          └─► queue (bounds: shed) ─► pump ──┘◄────────────────┴───────────────┘

A request that waits has its pair already, and its tokens count there, so that others choose with it in mind; when its
turn comes it chooses again. Who stands before it but waits for another worker does not hold it up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from services.config import ServeConfig
from services.protocol.errors import ErrorCode, RequestError
from services.router.admission.entrant import Choose, Entrant, promise
from services.router.admission.held import Held, Sent
from services.router.admission.order import Order
from services.router.admission.predict import Corrections, token_ms
from services.router.admission.promise import Promise, refusal
from services.router.admission.queue import WaitingQueue
from services.router.admission.rooms import Look, Rooms
from services.router.bookings import Booking
from services.router.plan import Plan
from services.router.policy_types import Terms
from services.router.timeline import Timeline
from services.router.types import RouterRequest
from services.router.view import RETRY_AFTER_S, View
from services.telemetry.metrics import RouterMetrics

TICK_S = 0.01
"""How often the queue looks for room that no event told of: computed tokens of long prompts, loads of other routers."""
TRY_S = 2.0
"""How old what an idle worker has shown must be, before it gets a request that is predicted to come too late."""
MAX_REPLANS = 8
"""Choices made anew in one look at the queue; each costs about as much as the first one did."""


class Gate:
    """One for a router; only its event loop touches it."""

    def __init__(self, config: ServeConfig, view: View, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        a = config.admission
        self._config = config
        self._view = view
        self._metrics = metrics
        self._clock = clock
        self._order = Order(a.order, priority_s=a.priority_s, weights=a.tenant_weights)
        self._queue: WaitingQueue[Entrant] = WaitingQueue(a.max_waiting, a.max_waiting_tokens)
        self._held = Held()
        self._rooms = Rooms(config, view, self._held, clock)
        self._corrections = Corrections()
        self._timer: asyncio.TimerHandle | None = None
        self._no_pair_since_s: float | None = None
        self._news_s: dict[str, float] = {}  # prefill worker -> when it last showed its speed, or was tried
        metrics.waiting.set_function(lambda: len(self._queue))
        metrics.waiting_tokens.set_function(lambda: self._queue.tokens)

    def reconfigure(self, config: ServeConfig) -> None:
        """Other bounds from now on; who waits already stays, and keeps the place that the order gave it."""
        self._config = config
        self._queue.max_requests = config.admission.max_waiting
        self._queue.max_tokens = config.admission.max_waiting_tokens
        self._rooms.reconfigure(config)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def enter(
        self, request: RouterRequest, choose: Choose, limit: tuple[float, RequestError], timeline: Timeline
    ) -> Plan | None:
        """Wait for the turn; returns where the request goes, None where nobody is there.

        Args:
            choose: the policy, but for the workers it is given; may raise RequestError.
            limit: monotonic second at which waiting ends, and with which error.
            timeline: is told what was predicted, also of a request that is refused.

        Raises:
            RequestError: OVERLOADED where a target cannot be met or too many wait, the limit's error, or the choice's.
        """
        w = Entrant.of(request, choose, self._config.budget.first_token_s)
        self._order.enter(w)
        self._rooms.learn()
        if len(self._news_s) > len(self._view.entries()):
            self._news_s = {name: s for name, s in self._news_s.items() if self._view.entry(name) is not None}
        is_sent = False
        try:
            if not self._assign(w):
                return None
            told = promise(w, self._queue, self._rooms, self._corrections, self._clock())
            timeline.promised(told)
            self._metrics.predicted_s.observe(told.ttft_ms / 1000)
            self._check(w, told)
            w.future = asyncio.get_running_loop().create_future()
            self._add(w)
            self._pump()
            w.is_new = False
            if not w.future.done():
                self._arm()
                await self._wait(w, limit)
            plan = w.future.result()
            self._view.bookings.cancel(w.request_id)  # the attempt books what it sends
            is_sent = True
            return plan
        finally:
            if not is_sent:
                self._withdraw(w)

    def sent(self, request: RouterRequest, booking: Booking, terms: Terms | None = None) -> None:
        """An attempt goes to its workers. Without the decision's ``terms`` nothing is learned of how long it takes."""
        self._held.ended(request.request_id)
        predicted_ms = 0.0
        if terms is not None:
            queue_ms = self._rooms.prompt_tokens(booking.prefill_id) * token_ms(terms, booking)
            predicted_ms = queue_ms + terms.load_ms + terms.compute_ms
        sent = Sent(booking=booking, sent_s=self._clock(), tpot_ms=request.slo.tpot_ms, predicted_ms=predicted_ms)
        self._held.sent(request.request_id, sent)

    def accepted(self, request_id: str) -> None:
        """Its prefill worker has it."""
        self._held.accepted(request_id, self._clock())

    def computed(self, request_id: str) -> None:
        """Its first token is here."""
        sent = self._held.computed(request_id)
        if sent is None:
            return
        if sent.predicted_ms:
            now = self._news_s[sent.booking.prefill_id] = self._clock()
            took_ms = 1000 * (now - sent.sent_s)
            self._corrections.observe(sent.booking.prefill_id, sent.predicted_ms, took_ms, now)
        self._pump()

    def left(self, request: RouterRequest, output_tokens: int, *, is_finished: bool) -> None:
        """It is over, however it ended."""
        self._held.ended(request.request_id)
        if output_tokens:
            self._order.charge(request.tenant, output_tokens)
        if is_finished and not request.pools:
            self._rooms.answers.observe(max(1, output_tokens // request.n))
        self._rooms.learn()
        self._pump()

    # --- before the queue ---

    def _assign(self, w: Entrant) -> bool:
        """Choose a pair as things are now, and count the work there. False: nobody is there. Raises RequestError."""
        self._view.bookings.cancel(w.request_id)
        full = self._rooms.full(w.request.n, w.request.slo.tpot_ms)
        w.plan = w.choose(full)
        w.lacks_decode = w.plan is None and bool(full)
        if w.lacks_decode:
            w.plan = w.choose(())
        if w.plan is None:
            return False
        self._view.bookings.book(w.request_id, w.plan.booking)
        return True

    def _check(self, w: Entrant, told: Promise) -> None:
        """Raises OVERLOADED where what is predicted is past a target."""
        margin = self._config.admission.margin
        found = refusal(w.request.slo, told, margin)
        if found is not None and not (told.is_idle and w.plan is not None and self._may_try(w, w.plan, told)):
            self._metrics.refusals.labels(found[0]).inc()
            raise found[1]

    def _may_try(self, w: Entrant, plan: Plan, told: Promise) -> bool:
        """An idle pair that has shown nothing for a while gets one request all the same, where it may have become fast
        enough: a worker that was slow once would be refused forever else."""
        now, worker_id = self._clock(), plan.prefill_id
        entry = self._view.entry(worker_id)
        is_unknown = entry is not None and not entry.load.prefill_tokens_per_s
        is_stale = now >= self._news_s.setdefault(worker_id, -math.inf if is_unknown else now) + TRY_S
        if not is_stale or self._rooms.num_sequences(plan.booking.decode_id):
            return False
        if not is_unknown and refusal(w.request.slo, told.hopeful(), self._config.admission.margin) is not None:
            return False
        self._news_s[worker_id] = now
        return True

    def _add(self, w: Entrant) -> None:
        """Raises OVERLOADED where the queue is full of others that matter no less."""
        a = self._config.admission
        for x in self._queue.add(w):
            bound = (
                f"{len(self._queue)} requests with {self._queue.tokens} prompt tokens wait, at most {a.max_waiting} "
                f"with {a.max_waiting_tokens} may (admission.max_waiting, admission.max_waiting_tokens)"
            )
            self._metrics.refusals.labels("bound" if x is w else "shed").inc()
            if x is w:
                raise _busy(f"{bound}, and none of them comes after this one with its priority {w.priority}")
            self._fail(x, _busy(f"{bound}; one with a better priority, or an earlier turn, took this one's place"))

    # --- the queue ---

    def _pump(self) -> None:
        """Send on whoever has room, in order."""
        if not self._queue:
            return
        replans, look = 0, Look(self._rooms)
        for w in self._queue:
            if w.plan is not None and self._must_wait(w, w.plan, look):
                continue
            if not w.is_new:
                if replans == MAX_REPLANS:
                    break
                replans += 1
                if not self._replan(w):
                    continue
            self._send_if_room(w, look)

    def _steal(self) -> None:
        """A worker has room and nobody waits for it: those first in order may prefer it by now."""
        look = Look(self._rooms)
        if all(look.is_busy(w) for w in self._rooms.prefill_ids()):
            return
        for w in [x for x in self._queue if not x.lacks_decode][:2]:
            if self._replan(w):
                self._send_if_room(w, look)

    def _must_wait(self, w: Entrant, plan: Plan, look: Look) -> bool:
        if w.lacks_decode:
            return not w.is_new and not look.has_decode_room(w.request.n, w.request.slo.tpot_ms)
        return look.is_busy(plan.prefill_id)

    def _send_if_room(self, w: Entrant, look: Look) -> None:
        if w.plan is not None and not w.lacks_decode and not look.is_busy(w.plan.prefill_id):
            self._send(w, w.plan)
            look.forget()

    def _replan(self, w: Entrant) -> bool:
        """A choice as things are now; False where there is none at the moment, or never."""
        try:
            return self._assign(w)
        except RequestError as error:
            self._fail(w, error)
            return False

    def _send(self, w: Entrant, plan: Plan) -> None:
        self._queue.remove(w)
        self._order.left(w)
        self.sent(w.request, plan.booking)
        if w.future is not None and not w.future.done():
            w.future.set_result(plan)

    def _fail(self, w: Entrant, error: RequestError) -> None:
        self._queue.remove(w)
        if w.future is not None and not w.future.done():
            w.future.set_exception(error)

    def _withdraw(self, w: Entrant) -> None:
        """It ends here: nothing of it is left."""
        self._queue.remove(w)
        self._order.withdrawn(w)
        self._held.ended(w.request_id)
        self._view.bookings.cancel(w.request_id)

    async def _wait(self, w: Entrant, limit: tuple[float, RequestError]) -> None:
        assert w.future is not None
        limit_s, error = limit
        try:
            async with asyncio.timeout(max(0.0, limit_s - self._clock())):
                await w.future
        except TimeoutError:
            raise error from None

    def _tick(self) -> None:
        self._timer = None
        if not self._queue:
            self._no_pair_since_s = None
            return
        if not self._is_hopeless():
            self._rooms.learn()
            self._pump()
            self._steal()
        if self._queue:
            self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _is_hopeless(self) -> bool:
        """There has been no pair for longer than anybody waits for one: those in the queue are told."""
        error = self._view.no_pair()
        if error is None:
            self._no_pair_since_s = None
            return False
        now = self._clock()
        self._no_pair_since_s = self._no_pair_since_s or now
        if now - self._no_pair_since_s >= self._config.router.rescue_wait_s:
            for w in self._queue:
                self._fail(w, RequestError(error.code, error.message, retry_after_s=RETRY_AFTER_S))
        return True


def _busy(message: str) -> RequestError:
    return RequestError(ErrorCode.OVERLOADED, message, retry_after_s=RETRY_AFTER_S)
