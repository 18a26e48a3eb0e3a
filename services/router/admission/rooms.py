"""Which workers can take one more request now: prefill workers by the work they hold, decode workers by their batch.

A prefill worker holds about `admission.held_steps` steps of prompts; the rest waits at the router, which owns the
order.
A decode worker takes `engine.max_num_seqs` sequences, and none that would slow those with a target past it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.config import ServeConfig
from services.router.admission.held import Held
from services.router.admission.predict import AnswerLength, StepModel, room_wait_ms
from services.router.member import WorkerEntry, WorkerState
from services.router.view import View

FORGET_S = 15.0
"""A decode worker that has made no step for so long is not judged by its old ones: who is refused makes it no new."""


@dataclass(slots=True)
class _Learned:
    """Of one decode worker."""

    epoch: str
    load_s: float = -1.0  # when its latest load came
    seen_s: float = -math.inf  # the same of the latest one that told of a step
    model: StepModel = field(default_factory=StepModel)


class Rooms:
    """What `Gate` asks of the cluster. Learns from loads whenever `learn` is called."""

    def __init__(self, config: ServeConfig, view: View, held: Held, clock: Callable[[], float]) -> None:
        self._view = view
        self._held = held
        self._clock = clock
        self._learned: dict[str, _Learned] = {}
        self.answers = AnswerLength()
        self.reconfigure(config)

    def reconfigure(self, config: ServeConfig) -> None:
        self._margin = config.admission.margin
        self._held_tokens = config.admission.held_steps * config.engine.max_num_batched_tokens
        self._max_sequences = config.engine.max_num_seqs

    def learn(self) -> None:
        """Take in what loads said since the last call; workers that left are forgotten."""
        entries = {e.worker_id: e for e in self._decoders()}
        for worker_id in self._learned.keys() - entries.keys():
            del self._learned[worker_id]
        for worker_id, e in entries.items():
            known = self._learned.get(worker_id)
            if known is None or known.epoch != e.epoch:
                known = self._learned[worker_id] = _Learned(e.epoch)
            if e.load_s != known.load_s:
                known.load_s = e.load_s
                if known.model.observe(e.load.running, e.load.step_ms):
                    known.seen_s = e.load_s

    def is_there(self, worker_id: str) -> bool:
        entry = self._view.entry(worker_id)
        return entry is not None and entry.state is WorkerState.READY

    def has_prefill_room(self, worker_id: str) -> bool:
        """Whether it holds less than its steps' work; always where nothing is held back."""
        return not self._held_tokens or self.prompt_tokens(worker_id) < self._held_tokens

    def prompt_tokens(self, worker_id: str) -> float:
        """Prompt tokens that it has still to compute; what waits in the router's queue is not there."""
        entry = self._view.entry(worker_id)
        if entry is None:
            return 0.0
        return self._held.prompt_tokens(worker_id, entry.load, entry.load_s, self._clock())

    def prefill_ids(self) -> list[str]:
        """Workers that compute prompts and are ready."""
        ready = (e for e in self._view.entries() if e.state is WorkerState.READY)
        return [e.worker_id for e in ready if e.role in ("prefill", "mixed")]

    def full(self, sequences: int, tpot_ms: float | None) -> tuple[str, ...]:
        """Workers that decode, and have no room for so many sequences more with this target."""
        if not self._held_tokens:
            return ()
        return tuple(e.worker_id for e in self._decoders() if self._is_full(e, sequences, tpot_ms))

    def step_ms(self, worker_id: str, sequences: int) -> float:
        """Predicted step of a decode worker with so many sequences more; 0: nothing is known."""
        entry = self._view.entry(worker_id)
        return 0.0 if entry is None else self._step_ms(worker_id, self._total(entry) + sequences)

    def least_step_ms(self, sequences: int) -> float:
        """Of a batch of so many alone, on the worker where that is fastest; 0: nothing is known of one."""
        return min((self._step_ms(e.worker_id, sequences) for e in self._decoders()), default=0.0)

    def num_sequences(self, worker_id: str) -> int:
        """That decode there, or will."""
        entry = self._view.entry(worker_id)
        return 0 if entry is None else self._total(entry)

    def wait_ms(self, worker_id: str, ahead: int) -> float:
        """Until a full decode worker has room for one more, behind ``ahead`` others that wait for it."""
        entry = self._view.entry(worker_id)
        if entry is None:
            return 0.0
        step_ms = self.step_ms(worker_id, 0) or max(0.0, entry.load.step_ms)
        return room_wait_ms(ahead + 1, self._total(entry), step_ms, self.answers.tokens)

    def has_decode_room(self, sequences: int, tpot_ms: float | None) -> bool:
        return any(not self._is_full(e, sequences, tpot_ms) for e in self._decoders())

    def _is_full(self, e: WorkerEntry, sequences: int, tpot_ms: float | None) -> bool:
        decoding, total = self._held.decoding(e.worker_id, e.load), self._total(e)
        if not total:
            return False
        if decoding >= self._max_sequences:
            return True
        targets = [t for t in (tpot_ms, self._held.tightest_tpot_ms(e.worker_id)) if t is not None]
        return bool(targets) and self.step_ms(e.worker_id, sequences) > min(targets) * self._margin

    def _step_ms(self, worker_id: str, batch: int) -> float:
        known = self._learned.get(worker_id)
        if known is None or self._clock() > known.seen_s + FORGET_S:
            return 0.0
        return known.model.step_ms(batch)

    def _total(self, e: WorkerEntry) -> int:
        return self._held.decoding(e.worker_id, e.load) + self._held.coming(e.worker_id)

    def _decoders(self) -> Iterable[WorkerEntry]:
        return (e for e in self._view.entries() if e.role in ("decode", "mixed") and e.state is WorkerState.READY)


class Look:
    """One look at the queue: each question is asked once, until something was sent."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._busy: dict[str, bool] = {}
        self._open: dict[tuple[int, float | None], bool] = {}

    def is_busy(self, worker_id: str) -> bool:
        """A prefill worker holds all it may. One that is gone is not busy: who waits for it has to choose again."""
        if worker_id not in self._busy:
            rooms = self._rooms
            self._busy[worker_id] = rooms.is_there(worker_id) and not rooms.has_prefill_room(worker_id)
        return self._busy[worker_id]

    def has_decode_room(self, sequences: int, tpot_ms: float | None) -> bool:
        key = sequences, tpot_ms
        if key not in self._open:
            self._open[key] = self._rooms.has_decode_room(sequences, tpot_ms)
        return self._open[key]

    def forget(self) -> None:
        self._busy.clear()
        self._open.clear()
