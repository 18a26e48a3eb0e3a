"""A request at the door, and what can be predicted for it as things are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.router.admission.order import Waiting
from services.router.admission.predict import Corrections, token_ms
from services.router.admission.promise import Promise
from services.router.admission.rooms import Rooms
from services.router.plan import Plan
from services.router.types import RouterRequest

Choose = Callable[[Collection[str]], Plan | None]
"""The policy, but for the workers that are named; may raise RequestError."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entrant(Waiting):
    """A request that waits, or is about to."""

    request: RouterRequest
    choose: Choose
    plan: Plan | None = None
    lacks_decode: bool = False  # its decode worker has no room
    is_new: bool = True  # the plan was made in this very moment
    future: asyncio.Future[Plan] | None = None

    @classmethod
    def of(cls, request: RouterRequest, choose: Choose, first_token_s: float) -> Entrant:
        """``first_token_s``: when the first token is due where the request has no target of its own."""
        target_s = request.slo.ttft_ms / 1000 if request.slo.ttft_ms else first_token_s
        return cls(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            tokens=len(request.prompt_ids),
            arrived_s=request.received_s,
            deadline_s=request.received_s + target_s,
            request=request,
            choose=choose,
        )


def promise(w: Entrant, queue: Iterable[Entrant], rooms: Rooms, corrections: Corrections, now_s: float) -> Promise:
    """What w, which has a plan, is predicted to take; of the queue only those before it count."""
    assert w.plan is not None
    terms, booking, n = w.plan.decision.choice.terms, w.plan.booking, w.request.n
    ahead = [x for x in queue if x.key < w.key]
    plans = [x.plan for x in ahead if x.plan is not None and x.plan.prefill_id == w.plan.prefill_id]
    tokens = rooms.prompt_tokens(booking.prefill_id) + sum(p.booking.prefill_tokens for p in plans)
    lacking = sum(x.lacks_decode for x in ahead)
    return Promise(
        ahead=len(ahead),
        waited_ms=1000 * (now_s - w.request.received_s),
        queue_ms=tokens * token_ms(terms, booking),
        load_ms=terms.load_ms,
        compute_ms=terms.compute_ms,
        room_ms=rooms.wait_ms(booking.decode_id, lacking) if w.lacks_decode else 0.0,
        is_idle=not tokens,
        correction=corrections.of(w.plan.prefill_id, now_s),
        spread=corrections.spread(w.plan.prefill_id, now_s),
        step_ms=rooms.step_ms(booking.decode_id, n),
        least_step_ms=rooms.least_step_ms(n),
    )
