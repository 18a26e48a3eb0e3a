"""What a request can be told before it is let in, and whether that is within its targets. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from services.protocol.errors import ErrorCode, RequestError
from services.router.admission.slo import SLO

HOPE = 4.0
"""How many times as fast as it was an idle worker may have become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Predicted milliseconds, made when the request came."""

    ahead: int = 0  # requests that stood in the queue before it
    waited_ms: float = 0.0  # since it was received, for body, text and checks
    queue_ms: float = 0.0  # work before it, at its prefill worker and in the queue before it
    load_ms: float = 0.0
    compute_ms: float = 0.0
    room_ms: float = 0.0  # until its decode worker has room
    correction: float = 1.0  # by which queue, load and compute are multiplied, as learned of the prefill worker
    spread: float = 1.0  # by which they are multiplied again for what 95 % stay below
    is_idle: bool = False  # its prefill worker has nothing else to do
    step_ms: float = 0.0  # of its decode worker with this request in the batch; 0: not known
    least_step_ms: float = 0.0  # of any decode worker with this request alone; 0: not known

    @property
    def ttft_ms(self) -> float:
        return self.waited_ms + self._worked_ms + self.room_ms

    @property
    def late_ms(self) -> float:
        """What the first token comes before in 95 of 100 cases; targets are compared with it.

        An idle worker is judged by its rate alone: what it did under load need not hold now, and only who is let in
        can tell.
        """
        factor = min(1.0, 1 / self.correction) if self.is_idle else self.spread
        return self.waited_ms + self._worked_ms * factor + self.room_ms

    @property
    def _worked_ms(self) -> float:
        return (self.queue_ms + self.load_ms + self.compute_ms) * self.correction

    def hopeful(self) -> Promise:
        """The same, were its workers faster than they were last seen, as they may be."""
        times = {f: getattr(self, f) / HOPE for f in ("queue_ms", "load_ms", "compute_ms", "step_ms", "least_step_ms")}
        return replace(self, **times)

    def to_dict(self) -> dict[str, Any]:
        return {"ttft_ms": round(self.ttft_ms, 3)} | {
            k: v if isinstance(v, bool) else round(v, 3) for k, v in asdict(self).items()
        }


def refusal(slo: SLO, promise: Promise, margin: float) -> tuple[str, RequestError] | None:
    """Which target is out of reach, and the error that says so with the numbers; None: none is.

    The time per token is out of reach only where it is even alone; else the request waits until its worker has room.
    """
    p = promise
    bound = f", by {p.late_ms:.0f} ms in 95 of 100 cases" if p.late_ms > p.ttft_ms else ""
    predicted = f"predicted after {p.ttft_ms:.0f} ms: {_parts(p)}{bound}"
    if slo.ttft_ms is not None and p.late_ms > slo.ttft_ms * margin:
        text = f"the first token is {predicted}; the target is {slo.ttft_ms:g} ms (ttft_ms, slo.ttft_ms)"
        return "ttft", _refused(text, margin, p.late_ms - slo.ttft_ms * margin)
    if slo.tpot_ms is not None and p.least_step_ms > slo.tpot_ms:
        text = (
            f"a token of one sequence alone takes {p.least_step_ms:.1f} ms on the fastest worker; the target is "
            f"{slo.tpot_ms:g} ms (tpot_ms, slo.tpot_ms)"
        )
        return "tpot", _refused(text, 1.0, 0.0)
    if slo.e2e_ms is not None and p.late_ms > slo.e2e_ms * margin:
        text = f"the first token alone is {predicted}; the target of the whole answer is {slo.e2e_ms:g} ms"
        return "e2e", _refused(f"{text} (e2e_ms, slo.e2e_ms)", margin, p.late_ms - slo.e2e_ms * margin)
    return None


def _parts(p: Promise) -> str:
    parts = [
        (p.waited_ms, "so far"),
        (p.queue_ms * p.correction, "queue"),
        (p.load_ms * p.correction, "loading KV"),
        (p.compute_ms * p.correction, "computing"),
        (p.room_ms, "waiting for a decode worker"),
    ]
    return " + ".join(f"{ms:.0f} {what}" for ms, what in parts if ms >= 0.5) or "0"


def _refused(text: str, margin: float, over_ms: float) -> RequestError:
    used = f", of which {100 * margin:.0f} % may be used (admission.margin)" if margin < 1 else ""
    return RequestError(ErrorCode.OVERLOADED, text + used, retry_after_s=max(1.0, over_ms / 1000))
