"""A circuit for each worker process: who fails again and again gets nothing for a while, then one request as a probe.

    closed ─`failures` in a row─► open ─`open_s`─► half-open ─probe succeeds─► closed
                                   ▲                   └─ probe fails: twice as long ─┐
                                   └──────────────────────────────────────────────────┘

Failures are errors of the worker's own (5xx, calls that broke while its stream stood) and failed transfers, which count
for both sides: the side that also works with others is cleared by its next success. A 4xx, a busy worker and a client
that left count for nothing. An open circuit takes the worker out of every choice, so where no pair is left, the router
is not ready. Circuits that only failed transfers opened do not go so far: where nobody else is there, the ladder can
still have one worker compute everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.protocol.errors import ErrorCode
from services.router.member import WorkerState
from services.router.view import View
from services.slo_config import HealthConfig

COUNTED = frozenset({ErrorCode.INTERNAL, ErrorCode.WORKER_LOST, ErrorCode.TRANSFER_FAILED})
JUDGED = frozenset({WorkerState.READY, WorkerState.TRIPPED})
SAME_S = 0.05
"""Failures so close to the one before have one cause and count once: a broken connection ends many requests."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Circuit:
    """Pure: the clock is an argument, in seconds."""

    settings: HealthConfig
    failures: int = 0  # in a row
    own_failures: int = 0  # of them those that were no transfers
    failed_s: float = float("-inf")  # when the last one was counted
    open_for_s: float = 0.0  # 0: closed
    opened_s: float = 0.0
    probed_s: float | None = None  # when the probe under way was sent

    def state(self, now_s: float) -> CircuitState:
        if not self.open_for_s:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < self.opened_s + self.open_for_s else CircuitState.HALF_OPEN

    def admits(self, now_s: float) -> bool:
        """Whether one more request may be sent."""
        state = self.state(now_s)
        if state is CircuitState.HALF_OPEN:
            return self.probed_s is None or now_s >= self.probed_s + self.settings.probe_s
        return state is CircuitState.CLOSED

    def sent(self, now_s: float) -> None:
        """A request goes to it; in half-open it is the probe."""
        if self.state(now_s) is CircuitState.HALF_OPEN:
            self.probed_s = now_s

    def succeeded(self, now_s: float) -> None:
        """It closes from half-open; what was sent before it opened says nothing while it is open."""
        if self.state(now_s) is not CircuitState.OPEN:
            self.failures, self.own_failures, self.open_for_s, self.probed_s = 0, 0, 0.0, None

    def failed(self, now_s: float, *, is_own: bool = True) -> bool:
        """True where this opened it. ``is_own``: it was no transfer, which either side may have failed."""
        s = self.settings
        state = self.state(now_s)
        if state is CircuitState.CLOSED and now_s < self.failed_s + SAME_S:
            return False
        self.failures, self.failed_s = self.failures + 1, now_s
        self.own_failures += is_own
        if (
            state is CircuitState.OPEN
            or not s.failures
            or (state is CircuitState.CLOSED and self.failures < s.failures)
        ):
            return False
        self.open_for_s = min(s.max_open_s, 2 * self.open_for_s or s.open_s)
        self.opened_s, self.probed_s = now_s, None
        return True


class Health:
    """Circuits of the workers that have failed lately, by id and epoch: another process starts with a closed one.

    Only the event loop touches it. What a circuit says is written into the view's entries by `judge`.
    """

    def __init__(
        self, settings: HealthConfig, view: View, clock: Callable[[], float], on_open: Callable[[str], None]
    ) -> None:
        """``on_open`` is told each worker whose circuit opens."""
        self._settings = settings
        self._view = view
        self._clock = clock
        self._on_open = on_open
        self._circuits: dict[tuple[str, str], Circuit] = {}

    def failed(self, code: ErrorCode, worker_ids: Iterable[str]) -> None:
        """An attempt failed by these workers. One that is lost or stalls is out of the choice already: not judged."""
        for worker_id in worker_ids:
            entry = self._view.entry(worker_id)
            if code not in COUNTED or entry is None or entry.state not in JUDGED:
                continue
            circuit = self._circuits.setdefault((worker_id, entry.epoch), Circuit(self._settings))
            if circuit.failed(self._clock(), is_own=code is not ErrorCode.TRANSFER_FAILED):
                self._on_open(worker_id)
        self.judge()

    def succeeded(self, *worker_ids: str) -> None:
        """They did what they were asked; "" is nobody."""
        for worker_id in worker_ids:
            if (circuit := self._find(worker_id)) is not None:
                circuit.succeeded(self._clock())
        self.judge()

    def sent(self, *worker_ids: str) -> None:
        """A request goes to them."""
        for worker_id in worker_ids:
            if (circuit := self._find(worker_id)) is not None:
                circuit.sent(self._clock())
        self.judge()

    def judge(self) -> None:
        """Bring the view up to date: circuits change with time alone. Cheap where all are closed."""
        now = self._clock()
        for key, circuit in list(self._circuits.items()):
            entry = self._view.entry(key[0])
            if entry is None or entry.epoch != key[1] or not circuit.failures:
                del self._circuits[key]
                if entry is not None:
                    entry.tripped = ""
                continue
            entry.tripped = "" if circuit.admits(now) else _reason(circuit, now)
        if self._circuits and self._view.no_pair() is not None:
            self._relax()

    def _relax(self) -> None:
        """Nobody is left: workers that only failed to move KV can still serve, each alone."""
        for (worker_id, _), circuit in self._circuits.items():
            entry = self._view.entry(worker_id)
            if entry is not None and not circuit.own_failures:
                entry.tripped = ""

    def _find(self, worker_id: str) -> Circuit | None:
        entry = self._view.entry(worker_id)
        return None if entry is None else self._circuits.get((worker_id, entry.epoch))


def _reason(circuit: Circuit, now_s: float) -> str:
    if circuit.state(now_s) is CircuitState.HALF_OPEN:
        return f"{circuit.failures} failures; one request is under way as a probe (health.failures)"
    left_s = circuit.opened_s + circuit.open_for_s - now_s
    return f"{circuit.failures} failures in a row; a probe may go there in {left_s:.1f} s (health.failures)"
