"""The writing half of the fault-injecting transport: decides by the rules what becomes of each write.

    submit ─┬─ no rule ─► the inner channel
            └─ a rule  ─► held by the wire thread ─► sent, lost, doubled … ─► what poll says

Writes that are held are sent by a thread of their own, since nobody polls for one that was reported FAILED.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import SubmitFailed, TransferError
from kvstore.transfer.base import Channel, Region, Write, WriteState, check_source
from tests.faults import wire
from tests.faults.control import Control, Rule, layer_of

TICK_S = 0.001
FLIP_S = 5.0
"""A reader that is alive flips a byte within this."""


@dataclass(slots=True, eq=False)
class Job:
    """One write that a rule took."""

    number: int
    write: Write
    rule: Rule
    rng: random.Random
    due_s: float
    state: WriteState = WriteState.PENDING
    sent: list[int] = field(default_factory=list)  # ids of the inner channel that are not done
    is_sent: bool = False
    flip: Path | None = None
    flip_by_s: float = 0.0


class FaultyChannel:
    """Over another transport's channel; ``instance`` is the reader's listener, for what lands past the channel."""

    def __init__(self, inner: Channel, region: Region, control: Control, instance: str) -> None:
        self._inner = inner
        self._region = region
        self._control = control
        self._instance = instance
        self._ids = itertools.count(1)
        self._through: dict[int, int] = {}  # our id: the inner channel's
        self._jobs: dict[int, Job] = {}
        self._ended: dict[int, WriteState] = {}  # of jobs, until they are polled
        self._lock = threading.RLock()
        self._sending = threading.Lock()  # submit of the inner channel is for one thread at a time
        self._is_closing = False
        self._has_work = threading.Event()
        self._free_s = 0.0
        self._last_sent_s: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def submit(self, writes: Sequence[Write]) -> list[int]:
        check_source(self._region, writes)
        rules = self._control.rules()
        if rules.first("fail_submit"):
            self._control.note("fail_submit", writes=len(writes))
            raise SubmitFailed("injected: nothing was started")
        with self._lock:
            if self._is_closing:
                raise SubmitFailed("the channel is closed")
            ids = [next(self._ids) for _ in writes]
            plain: list[tuple[int, Write]] = []
            for number, write in zip(ids, writes, strict=True):
                layer = layer_of(write.source_offset, self._region.num_bytes, rules.num_layers)
                match = rules.match(layer, write.ticket_id)
                if match is None:
                    plain.append((number, write))
                else:
                    self._hold(Job(number, write, *match, self._due_s(write, *match)), layer)
                self._last_sent_s[write.ticket_id] = time.monotonic() if match is None else 0.0
        if plain:
            with self._sending:
                inner_ids = self._inner.submit([write for _, write in plain])
            self._through.update(zip((number for number, _ in plain), inner_ids, strict=True))
        return ids

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        with self._lock:
            states = dict.fromkeys(ids, WriteState.PENDING)
            states.update((i, self._ended.pop(i)) for i in ids if i in self._ended)
            asked = {self._through[i]: i for i in ids if i in self._through}
            for inner, state in self._inner.poll(list(asked)).items():
                states[asked[inner]] = state
                if state is not WriteState.PENDING:
                    del self._through[asked[inner]]
        return states

    def close(self) -> None:
        rule = self._control.rules().first("unconfirmed_close")
        with self._lock:
            first = not self._is_closing
            self._is_closing = True
            held = [job for job in self._jobs.values() if not job.is_sent]
            if rule is not None and first:
                self._leave_on_wire(held, rule.seconds)
            elif first:
                for job in held:
                    self._control.note("held_fenced", ticket=job.write.ticket_id, fault=job.rule.fault)
            self._jobs.clear()
        self._has_work.set()
        self._inner.close()
        if self._thread is not None:
            self._thread.join()
        if rule is not None:
            raise TransferError("injected: the reader did not confirm the end of the channel")

    # What becomes of a write

    def _due_s(self, write: Write, rule: Rule, rng: random.Random) -> float:
        now_s = time.monotonic()
        if rule.fault == "throttle":
            self._free_s = max(now_s, self._free_s) + write.num_bytes / rule.bytes_per_s
            return self._free_s
        return now_s + (rule.seconds * rng.random() if rule.fault == "reorder" else rule.seconds)

    def _hold(self, job: Job, layer: int) -> None:
        self._control.note(job.rule.fault, ticket=job.write.ticket_id, layer=layer, bytes=job.write.num_bytes)
        if job.rule.fault == "late":
            self._ended[job.number] = WriteState.FAILED
        self._jobs[job.number] = job
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="faulty-wire", daemon=True)
            self._thread.start()
        self._has_work.set()

    def _leave_on_wire(self, held: Sequence[Job], seconds: float) -> None:
        """The source is read no more after close, so its bytes travel as they are now."""
        for job in held:
            write = job.write
            payload = ctypes.string_at(self._region.address + write.source_offset, write.num_bytes)
            due_s = time.monotonic() + seconds
            packet = wire.Packet(due_s=due_s, ticket_id=write.ticket_id, offset=write.target_offset)
            wire.send(self._control, self._instance, packet, payload)
            self._control.note("left_on_wire", ticket=write.ticket_id, bytes=write.num_bytes)

    def _run(self) -> None:
        while not self._is_closing:
            self._has_work.wait()
            with self._lock:
                jobs = list(self._jobs.values())
                if not jobs:
                    self._has_work.clear()
            for job in jobs:
                self._step(job)
            time.sleep(TICK_S)

    def _step(self, job: Job) -> None:
        if not job.is_sent:
            if self._is_due(job):
                self._send(job)
            return
        with self._lock:
            if self._is_closing:
                return
            states = self._inner.poll(job.sent)
            job.sent = [i for i, state in states.items() if state is WriteState.PENDING]
            if WriteState.FAILED in states.values():
                job.state = WriteState.FAILED
            if not job.sent:
                self._after_landing(job)

    def _is_due(self, job: Job) -> bool:
        if job.rule.fault == "stall":
            return False
        now_s = time.monotonic()
        if job.rule.fault != "last":
            return now_s >= job.due_s
        with self._lock:
            others = any(j is not job and j.rule.fault != "last" and j.write.ticket_id == job.write.ticket_id
                         for j in self._jobs.values())  # fmt: skip
            quiet_s = now_s - max(self._last_sent_s.get(job.write.ticket_id, 0.0), job.due_s - job.rule.seconds)
        return not others and quiet_s >= job.rule.seconds

    def _send(self, job: Job) -> None:
        if job.rule.fault in ("drop", "fail_completion"):
            self._end(job, WriteState.DONE if job.rule.fault == "drop" else WriteState.FAILED)
            return
        with self._lock:
            if self._is_closing or job.number not in self._jobs:
                return
            job.is_sent = True  # from here on it is the inner channel's to fence
        try:
            with self._sending:
                job.sent = self._inner.submit([job.write] * (2 if job.rule.fault == "duplicate" else 1))
        except TransferError:
            self._end(job, WriteState.FAILED)
            return
        if job.rule.fault == "late":
            self._control.note("late_sent", ticket=job.write.ticket_id)

    def _after_landing(self, job: Job) -> None:
        if job.rule.fault != "corrupt" or job.state is WriteState.FAILED:
            self._end(job, WriteState.FAILED if job.state is WriteState.FAILED else WriteState.DONE)
        elif job.flip is None:
            at = job.write.target_offset + job.rng.randrange(job.write.num_bytes)
            packet = wire.Packet(due_s=0.0, ticket_id=job.write.ticket_id, offset=at, flips=1 << job.rng.randrange(8))
            job.flip = wire.send(self._control, self._instance, packet)
            job.flip_by_s = time.monotonic() + FLIP_S
        elif not job.flip.exists() or time.monotonic() > job.flip_by_s:
            self._end(job, WriteState.DONE)

    def _end(self, job: Job, state: WriteState) -> None:
        with self._lock:
            if self._jobs.pop(job.number, None) is not None and job.rule.fault != "late":
                self._ended[job.number] = state
