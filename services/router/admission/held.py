"""What this router has sent to each worker and is not done: prompts without a first token, sequences without an end.

    sent ─► (accepted, shown by the worker's load) ─computed─► decodes ─ended─► gone

A worker's load counts everything that it had when it was sent; what was sent since, or has not been accepted yet, is
added here. Between two loads, prompt tokens are taken to be computed at the measured rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.protocol.proto import worker_pb2
from services.router.bookings import Booking

SETTLE_S = 0.01
"""A load that came so soon after a request was accepted may have been sent before."""


@dataclass(slots=True)
class Sent:
    """One request at its workers."""

    booking: Booking
    sent_s: float
    tpot_ms: float | None  # its target
    predicted_ms: float = 0.0  # to its first token, uncorrected
    accepted_s: float | None = None
    is_computed: bool = False


@dataclass(slots=True)
class _Worker:
    prompts: set[str] = field(default_factory=set)  # without a first token
    sequences: set[str] = field(default_factory=set)  # that decode here, or will


class Held:
    """Only the event loop touches it. Each method costs at most the requests of one worker."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def get(self, request_id: str) -> Sent | None:
        return self._sent.get(request_id)

    def sent(self, request_id: str, sent: Sent) -> None:
        """It goes to these workers; where it went before, it is no more."""
        self.ended(request_id)
        self._sent[request_id] = sent
        self._worker(sent.booking.prefill_id).prompts.add(request_id)
        self._worker(sent.booking.decode_id).sequences.add(request_id)

    def accepted(self, request_id: str, now_s: float) -> None:
        if (sent := self._sent.get(request_id)) is not None:
            sent.accepted_s = now_s

    def computed(self, request_id: str) -> Sent | None:
        """Its first token is here; None where that is known already."""
        sent = self._sent.get(request_id)
        if sent is None or sent.is_computed:
            return None
        sent.is_computed = True
        self._worker(sent.booking.prefill_id).prompts.discard(request_id)
        self._drop_if_idle(sent.booking.prefill_id)
        return sent

    def ended(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        for worker_id in {sent.booking.prefill_id, sent.booking.decode_id}:
            if (worker := self._workers.get(worker_id)) is not None:
                worker.prompts.discard(request_id)
                worker.sequences.discard(request_id)
                self._drop_if_idle(worker_id)

    def prompt_tokens(self, worker_id: str, load: worker_pb2.Load, load_s: float, now_s: float) -> float:
        """Prompt tokens that this worker has still to compute."""
        left = load.waiting_prefill_tokens - max(0.0, load.prefill_tokens_per_s) * (now_s - load_s)
        prompts = self._workers[worker_id].prompts if worker_id in self._workers else ()
        new = (self._sent[r] for r in prompts)
        return max(0.0, left) + sum(s.booking.prefill_tokens for s in new if _is_after(s, load_s))

    def decoding(self, worker_id: str, load: worker_pb2.Load) -> int:
        """Sequences that are there past their prompt, of all routers as far as the load says."""
        own = sum(s.booking.sequences for s in self._decoders(worker_id) if s.is_computed)
        return max(own, load.running + load.waiting)

    def coming(self, worker_id: str) -> int:
        """Sequences that will decode there once their prompts are computed."""
        return sum(s.booking.sequences for s in self._decoders(worker_id) if not s.is_computed)

    def tightest_tpot_ms(self, worker_id: str) -> float | None:
        """The least target of those that decode there."""
        return min((s.tpot_ms for s in self._decoders(worker_id) if s.tpot_ms is not None), default=None)

    def _decoders(self, worker_id: str) -> list[Sent]:
        worker = self._workers.get(worker_id)
        return [] if worker is None else [self._sent[r] for r in worker.sequences]

    def _worker(self, worker_id: str) -> _Worker:
        return self._workers.setdefault(worker_id, _Worker())

    def _drop_if_idle(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.prompts and not worker.sequences:
            del self._workers[worker_id]


def _is_after(sent: Sent, load_s: float) -> bool:
    return sent.accepted_s is None or sent.accepted_s + SETTLE_S > load_s
