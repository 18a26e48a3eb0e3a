"""What happened to each request, and when: kept for the live ones and for a ring of finished ones.

    open ─mark(accept, tokenized)─► attempt ─► worker events, hand-off ─► mark(first_token, first_byte) ─► close ─► ring

The front opens and closes a timeline; the flow opens one itself (and then closes it) where no front did.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from services.protocol.proto import worker_pb2
from services.router.admission.promise import Promise
from services.router.admission.slo import NO_SLO, SLO, Times, misses
from services.router.breakdown import Points, Stages, rest_parts, ttft_parts
from services.router.types import ACCEPT, DONE, FIRST_BYTE, TOKENIZED

FIRST_TOKEN = "first_token"
"""The flow gave the first token to its front; stands in for FIRST_BYTE where the front never marked one."""
COMMITTED = "committed"
MAX_EVENTS = 512
"""Events kept for one request; the rest is only counted."""


@dataclass(slots=True)
class Attempt:
    """One try: a submission, the same KV handed to another decode worker (``retarget``), a stream that other workers
    take over (``migrate``), or everything on one worker where KV could not be moved (``compute_here``)."""

    number: int
    kind: str  # submit | retarget | migrate | compute_here
    prefill: str  # worker id; of a mixed worker too
    decode: str  # "" where one worker does all
    at_us: int
    decision: dict[str, Any]


@dataclass(slots=True)
class Handoff:
    """The latest report of the hand-off."""

    state: str
    transport: str
    bytes: int
    layers: int
    error: str = ""


@dataclass(slots=True)
class Timeline:
    """One request. Only the event loop touches it."""

    request_id: str
    label: str
    received_s: float
    clock: Callable[[], float]
    on_close: Callable[[Timeline], None]
    marks: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    events_dropped: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    handoff: Handoff | None = None
    outcome: str = ""  # "" while live
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # of all choices
    longest_choice_tokens: int = 0
    is_pooled: bool = False
    slo: SLO = NO_SLO
    promise: Promise | None = None  # what was predicted when it came
    first_stages: Stages = field(default_factory=Stages)
    _decode: Stages = field(default_factory=Stages)
    _exposed_ms: float = 0.0  # token 1 here .. hand-off reported as committed
    _token_1_us: int | None = None
    _accepted_us: dict[tuple[str, int], int] = field(default_factory=dict)  # (worker, attempt) -> see worker_event
    _first_attempt: int = 0  # the attempt that gave token 1

    # --- the front ---

    def mark(self, name: str, at_s: float | None = None) -> None:
        """A state was reached now, or at the monotonic second ``at_s``. Only the first mark of a name counts."""
        if name not in self.marks:
            self.marks[name] = self.clock() if at_s is None else at_s
            self.note(name, at_us=self._since(self.marks[name]))

    def close(self, outcome: str, at_s: float | None = None) -> None:
        """Mark DONE and move to the ring. ``outcome``: ok, cancelled or an ErrorCode. Only the first call counts."""
        if self.outcome:
            return
        self.mark(DONE, at_s)
        self.outcome = outcome
        self.on_close(self)

    # --- the flow ---

    def note(self, name: str, *, worker: str = "", attempt: int = 0, at_us: int | None = None, **detail: Any) -> None:
        """Append an event; `at_us` is microseconds since the request was received, now if not given."""
        if len(self.events) >= MAX_EVENTS:
            self.events_dropped += 1
            return
        event = {"name": name, "at_ms": (self.now_us() if at_us is None else at_us) / 1000}
        event |= {k: v for k, v in (("worker", worker), ("attempt", attempt), ("detail", detail)) if v}
        self.events.append(event)

    def promised(self, promise: Promise) -> None:
        """What the router predicted before it let the request in, or refused it."""
        self.promise = promise
        self.note("promised", ttft_ms=round(promise.ttft_ms, 3), ahead=promise.ahead)

    def begin_attempt(self, number: int, kind: str, pair: tuple[str, str], decision: dict[str, Any]) -> None:
        """``pair``: prefill (or mixed) worker and decode worker ("" where there is none)."""
        self.attempts.append(Attempt(number, kind, *pair, at_us=self.now_us(), decision=decision))
        self.note(kind, attempt=number, prefill=pair[0], decode=pair[1])

    def worker_event(self, worker: str, event: worker_pb2.TimelineEvent) -> None:
        """An arrow that a worker reports, in milliseconds since that worker accepted the attempt.

        When that was on our clock is bounded from above by each event's arrival; the least bound so far is taken.
        """
        at_us, key = round(event.at_ms * 1000), (worker, event.attempt)
        accepted_us = self._accepted_us[key] = max(0, min(self.now_us() - at_us, self._accepted_us.get(key, 1 << 62)))
        detail = _parsed(event.detail_json)
        self.note(event.name, worker=worker, attempt=event.attempt, at_us=accepted_us + at_us, **detail)

    def first_token_times(self, attempt: int, times: worker_pb2.StageTimes, cached_tokens: int) -> None:
        """What the worker that sampled token 1 measured."""
        self._first_attempt, self.first_stages, self.cached_tokens = attempt, _stages(times), cached_tokens
        self._token_1_us = self.now_us()

    def decode_times(self, times: worker_pb2.StageTimes) -> None:
        """What the decode worker measured; later reports win."""
        self._decode = _stages(times)

    def handoff_report(self, report: worker_pb2.HandoffReport) -> None:
        """How the hand-off ended. Comes after the end, too: the decode worker may be done before the report is here."""
        self.handoff = Handoff(report.state, report.transport, report.bytes, report.layers, report.error.message)
        if report.state == COMMITTED and self._token_1_us is not None and not self.is_migrated:
            self._exposed_ms = (self.now_us() - self._token_1_us) / 1000
        self.note(f"handoff_{report.state}", attempt=report.attempt, bytes=report.bytes, layers=report.layers)

    # --- reading ---

    @property
    def ttft_ms(self) -> float | None:
        first = self.points().first_byte_us
        return None if first is None else first / 1000

    @property
    def e2e_ms(self) -> float | None:
        done = self.points().done_us
        return None if done is None else done / 1000

    @property
    def times(self) -> Times:
        points, stages = self.points(), Stages(transfer_exposed_ms=self.transfer[1], wait_ms=self._decode.wait_ms)
        return Times(
            ttft_ms=self.ttft_ms,
            e2e_ms=self.e2e_ms,
            tokens=self.longest_choice_tokens,
            first_parts_us=ttft_parts(points, self.first_stages),
            rest_parts_us=rest_parts(points, stages),
        )

    @property
    def prediction_error(self) -> float | None:
        """(predicted − actual) / actual time to the first token; None before it, or where nothing was predicted."""
        actual_ms = self.ttft_ms
        return (self.promise.ttft_ms - actual_ms) / actual_ms if self.promise and actual_ms else None

    @property
    def is_migrated(self) -> bool:
        """Later hand-offs say nothing about token 1."""
        return any(a.kind == "migrate" for a in self.attempts)

    @property
    def transfer(self) -> tuple[float, float]:
        """Milliseconds that token 1 was computed for, and that the hand-off took beyond it."""
        return self.first_stages.compute_ms, self.first_stages.transfer_exposed_ms or self._exposed_ms

    def now_us(self) -> int:
        return self._since(self.clock())

    def points(self) -> Points:
        submitted = [a for a in self.attempts if a.kind != "retarget" and a.number <= (self._first_attempt or a.number)]
        first = self.marks.get(FIRST_BYTE, self.marks.get(FIRST_TOKEN))
        return Points(
            accept_us=self._mark_us(ACCEPT),
            tokenized_us=self._mark_us(TOKENIZED),
            submitted_us=submitted[-1].at_us if submitted else None,
            first_byte_us=None if first is None else self._since(first),
            done_us=self._mark_us(DONE),
        )

    def to_dict(self) -> dict[str, Any]:
        """Body of /debug/requests/{id}. Times in ms since the request was received; no text, no token ids."""
        times, last, moved = self.times, self.attempts[-1] if self.attempts else None, self.handoff
        error = self.prediction_error
        return {
            "request_id": self.request_id,
            "label": self.label,
            "outcome": self.outcome or "live",
            "prefill": last.prefill if last else "",
            "decode": last.decode if last else "",
            "transport": moved.transport if moved else "",
            "bytes_moved": moved.bytes if moved else 0,
            "layers_moved": moved.layers if moved else 0,
            "handoff": asdict(moved) if moved else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": times.ttft_ms,
            "e2e_ms": times.e2e_ms,
            "ttft_parts_ms": {k: v / 1000 for k, v in times.first_parts_us.items()},
            "rest_parts_ms": {k: v / 1000 for k, v in times.rest_parts_us.items()},
            "slo_ms": self.slo.targets,
            "slo_missed": misses(self.slo, self.outcome, times) if self.outcome else {},
            "promise": self.promise.to_dict() if self.promise else None,
            "ttft_prediction_error": None if error is None else round(error, 4),
            "attempts": [_attempt_dict(a) for a in self.attempts],
            "events": sorted(self.events, key=lambda e: e["at_ms"]),
            "events_dropped": self.events_dropped,
        }

    def _since(self, at_s: float) -> int:
        return max(0, round((at_s - self.received_s) * 1_000_000))

    def _mark_us(self, name: str) -> int | None:
        return self._since(self.marks[name]) if name in self.marks else None


class Timelines:
    """Live timelines by id, and the last ``kept`` finished ones."""

    def __init__(
        self,
        kept: int,
        max_live: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[Timeline], None] = lambda _timeline: None,
    ) -> None:
        self._kept = kept
        self._max_live = max_live
        self._clock = clock
        self._on_close = on_close
        self._live: OrderedDict[str, Timeline] = OrderedDict()
        self._finished: OrderedDict[str, Timeline] = OrderedDict()
        self._labels: dict[str, str] = {}  # label -> the latest request that carries it

    def open(self, request_id: str, label: str = "", received_s: float | None = None) -> Timeline:
        """The timeline of a request; a second call with the same id returns the same one.

        Past ``max_live`` open ones the oldest is closed as ``abandoned``: whoever opened it forgot it.
        """
        known = self._live.get(request_id)
        if known is not None:
            return known
        if len(self._live) >= self._max_live:
            next(iter(self._live.values())).close("abandoned")
        received = self._clock() if received_s is None else received_s
        timeline = Timeline(request_id, label, received, self._clock, self._finish)
        self._live[request_id] = timeline
        if label:
            self._labels[label] = request_id
        return timeline

    def live(self, request_id: str) -> Timeline | None:
        return self._live.get(request_id)

    def find(self, request_id_or_label: str) -> Timeline | None:
        """By id, else the latest with that label; None where it is unknown or has left the ring."""
        for key in (request_id_or_label, self._labels.get(request_id_or_label, "")):
            found = self._live.get(key) or self._finished.get(key)
            if found is not None:
                return found
        return None

    def __len__(self) -> int:
        return len(self._live) + len(self._finished)

    def _finish(self, timeline: Timeline) -> None:
        self._live.pop(timeline.request_id, None)
        self._finished[timeline.request_id] = timeline
        while len(self._finished) > self._kept:
            _, old = self._finished.popitem(last=False)
            if self._labels.get(old.label) == old.request_id:
                del self._labels[old.label]
        self._on_close(timeline)


def _stages(times: worker_pb2.StageTimes) -> Stages:
    return Stages(
        queue_ms=times.queue_ms,
        kv_load_ms=times.kv_load_ms,
        compute_ms=times.compute_ms,
        transfer_exposed_ms=times.transfer_exposed_ms,
        wait_ms=times.wait_ms,
    )


def _attempt_dict(attempt: Attempt) -> dict[str, Any]:
    data = asdict(attempt)
    data["at_ms"] = data.pop("at_us") / 1000
    return data


def _parsed(detail_json: str) -> dict[str, Any]:
    """A worker's detail; what is not a JSON object is shown as text."""
    if not detail_json:
        return {}
    try:
        detail = json.loads(detail_json)
    except ValueError:
        return {"text": detail_json[:200]}
    reserved = {"name", "worker", "attempt", "at_us"}
    return {f"{k}_" if k in reserved else str(k): v for k, v in detail.items()} if isinstance(detail, dict) else {}
