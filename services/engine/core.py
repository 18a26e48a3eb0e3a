"""The engine without its process: messages in, messages out, one step at a time.

    handle(message) … ─► advance() = schedule ─► Reserved, PrefillStarted ─► run ─► StepDone

Everything here runs on one thread and never waits; `services.engine.child` gives it a pipe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvstore.transfer.progress import Chunk
from services.engine.compiling import POLL_S, Compiling, sequence_of
from services.engine.loading import Loads
from services.engine.messages import (
    AbortSequence,
    AddSequence,
    GetSteps,
    Loaded,
    PinBlocks,
    PrefillStarted,
    ReleaseSequence,
    Reserved,
    ReserveRefused,
    ReserveSequence,
    SequenceOutput,
    StartSequence,
    Stats,
    StepDone,
    Steps,
    TokenLogprobs,
    Unquarantine,
)
from services.engine.pins import Pins
from services.engine.runner import Executed, Runner, Tally
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Work
from services.engine.step_log import StepLog
from services.engine.tiers import Tiers
from services.engine.waste import waste_of
from services.protocol.errors import RequestError

log = logging.getLogger("pdray.engine")


class Progress(Protocol):
    """Where layers are reported as they are computed; see `kvstore.transfer.progress.ProgressSender`."""

    def begin(self, step: int, chunks: Sequence[Chunk]) -> None: ...
    def layer(self, step: int, layer: int, at_s: float) -> None: ...
    def end(self, step: int, at_s: float) -> None: ...


@dataclass(slots=True)
class _Times:
    accepted_s: float
    scheduled_s: float | None = None


class Engine:
    """Scheduler and runner of one worker. ``send`` takes each message for the service process."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        send: Callable[[Any], None],
        clock: Callable[[], float],
        progress: Progress | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tally = Tally()
        self.num_steps = 0  # that computed anything
        self._send = send
        self._clock = clock
        self._progress = progress
        self._compiling = Compiling(runner.grammars)
        self._pins = Pins(scheduler.roster.pool)
        self.tiers = tiers or Tiers(scheduler.roster.pool, num_layers=1)
        self._loads = Loads(scheduler, self.tiers, send, clock)
        self._times: dict[str, _Times] = {}
        self._outputs: list[SequenceOutput] = []  # for the next StepDone
        self._changed = False  # since the last StepDone, in a way that its stats would show
        self._running_told = 0
        self._tokens_generated = 0
        self._bad_names = 0
        self._log = StepLog(scheduler, scheduler.rules.steps_kept)

    def handle(self, message: Any) -> None:
        """Take in one message of the service process. What is wrong with a request ends that request."""
        self._changed |= not isinstance(message, GetSteps)
        now = self._clock()
        if isinstance(message, AddSequence | ReserveSequence):
            if not self._compiling.hold(message, now):
                self._accept(message, now)
        elif isinstance(message, StartSequence):
            self._times[message.seq_id] = _Times(now)
            told = {(message.seq_id, choice): x for choice, x in message.first_logprobs}
            self._emit([_scored(o, told) for o in self.scheduler.start(message)], message.seq_id)
            self._copy()
        elif isinstance(message, AbortSequence) and message.choice is not None:
            self.scheduler.drop(message.seq_id, message.choice)
            self._emit([], message.seq_id)
        elif isinstance(message, AbortSequence) and self._drop(message.seq_id):
            self._outputs.append(SequenceOutput(seq_id=message.seq_id, position=0, token_ids=(), finish_reason="abort"))
        elif isinstance(message, AbortSequence):
            quarantine = self._loads.end(message.seq_id, message.quarantine)
            aborted = self.scheduler.abort(message.seq_id, quarantine=quarantine)
            self._emit([] if aborted is None else [aborted], message.seq_id)
        elif isinstance(message, PinBlocks):
            self._send(self._pins.pin(message))
        elif isinstance(message, ReleaseSequence) and self._pins.release(message.seq_id):
            return
        elif isinstance(message, ReleaseSequence):
            self._times.pop(message.seq_id, None)
            self._drop(message.seq_id)
            quarantine = self._loads.end(message.seq_id, message.quarantine)
            self.scheduler.release(message.seq_id, quarantine=quarantine)
        elif isinstance(message, Unquarantine):
            self._loads.unquarantine(message.seq_id)
        elif isinstance(message, Loaded):
            self._loads.answered(message)
        elif isinstance(message, GetSteps):
            self._send(Steps(json=self._log.last(message.last)))
        else:
            raise TypeError(f"the engine does not know {type(message).__name__}")

    def advance(self) -> bool:
        """Run one step if there is any; True where another may follow at once."""
        for held, error in self._compiling.take():
            self._changed = True
            if error is None:
                self._accept(held.message, held.accepted_s)
            else:
                self._admit(held.message, held.accepted_s, error)
        for message, accepted_s in self._loads.take():
            self._admit(message, accepted_s)
        self._changed |= self._loads.advance()
        self._loads.refresh()
        step = self.scheduler.schedule()
        self._loads.begin(step.loading)
        for seq in step.reserved:
            cached = seq.num_named_blocks
            self._send(Reserved(seq_id=seq.seq_id, block_ids=tuple(seq.block_ids), cached_blocks=cached))
        for seq in step.started:
            cached = seq.num_computed_tokens // self.scheduler.limits.block_size
            self._send(PrefillStarted(seq_id=seq.seq_id, block_ids=tuple(seq.block_ids), cached_blocks=cached))
        if step.work:
            self._run(step)
        paused = self.scheduler.num_running != self._running_told  # it must not look like a stalled one
        if step.work or step.reserved or step.loading or self._changed or self._outputs or paused:
            self._report()
        return bool(step.work or step.loading)

    @property
    def patience_s(self) -> float | None:
        """How long to wait for messages when there is nothing to compute; None: for ever."""
        waits = [s for s in (POLL_S if self._compiling else None, self._loads.patience_s) if s is not None]
        return min(waits, default=None)

    def stats(self) -> Stats:
        counts = self.scheduler.roster.pool.counts()
        waste = waste_of(self.scheduler.roster.running.values(), self.scheduler.limits.block_size)
        return Stats(
            step=self.num_steps,
            running=self.scheduler.num_running,
            waiting=len(self.scheduler.roster.queue),
            waiting_prefill_tokens=self.scheduler.waiting_prefill_tokens,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_used=counts.used,
            blocks_cached=counts.cached,
            blocks_reserved=counts.reserved,
            blocks_quarantined=counts.quarantined,
            prompt_tokens_computed=self.tally.prompt_tokens_computed,
            prompt_tokens_cached=self.scheduler.roster.prompt_tokens_cached,
            tokens_generated=self._tokens_generated,
            decode_tokens_forwarded=self.tally.decode_tokens_forwarded,
            tokens_recomputed=self.tally.tokens_recomputed,
            tokens_forwarded=self.tally.tokens_forwarded,
            preemptions=self.scheduler.roster.preemptions,
            prefill_tokens_per_s=self._log.prefill_rate,
            step_ms=self._log.decode_ms,
            kv_unused_tokens=waste.unused_tokens,
            kv_unwritten_blocks=waste.unwritten_blocks + counts.reserved,
            output_mispredictions=self.scheduler.admission.mispredictions,
            admissions_held_back=self.scheduler.admission.held_back,
            cached_by_source=tuple(sorted(self.scheduler.roster.cached_by_source.items())),
            loads_failed=self._loads.failed,
        )

    def _accept(self, message: AddSequence | ReserveSequence, now: float) -> None:
        if not (isinstance(message, AddSequence) and self._loads.hold(message, now)):
            self._admit(message, now)

    def _drop(self, seq_id: str) -> bool:
        """Forget a sequence that is not in the scheduler yet; False where there is none."""
        return self._compiling.drop(seq_id) or self._loads.drop(seq_id)

    def _admit(self, message: AddSequence | ReserveSequence, now: float, error: RequestError | None = None) -> None:
        """Give a sequence to the scheduler; what is wrong with it, such as ``error``, ends it."""
        seq = sequence_of(message)
        if isinstance(message, AddSequence) and seq.seq_id in self.scheduler.roster.groups:
            log.error("sequence %s was added twice; the first one goes on", seq.seq_id)
            return
        try:
            if error is not None:
                raise error
            if isinstance(message, AddSequence):
                self.scheduler.add(message)
                self._times[seq.seq_id] = _Times(now)
            else:
                self.scheduler.reserve(message)
        except RequestError as exc:
            if isinstance(message, ReserveSequence):
                self._send(ReserveRefused(seq_id=seq.seq_id, code=exc.code.value, message=exc.message))
                return
            self._outputs.append(
                SequenceOutput(
                    seq_id=seq.seq_id,
                    position=len(seq.output_ids),
                    token_ids=(),
                    finish_reason="error",
                    error_code=exc.code.value,
                    error=exc.message,
                )
            )

    def _run(self, step: Step) -> None:
        started = self._clock()
        for work in step.work:
            times = self._times.get(work.sequence.group_id)
            if times is not None and times.scheduled_s is None:
                times.scheduled_s = started
        done = self._execute(step)
        self.num_steps += 1
        self.tally += done.tally
        self._tokens_generated += len(done.taken.tokens)
        for seq_id, (first, told) in done.taken.prompt_logprobs.items():
            part = SequenceOutput(seq_id=seq_id, position=0, token_ids=(), prompt_start=first, prompt_logprobs=told)
            self._emit([part], seq_id)
        for output in self.scheduler.complete(step, done.taken.tokens, done.taken.failures):
            output.pooled = done.taken.pooled.get(output.seq_id, b"")
            self._emit([_scored(output, done.taken.logprobs)], output.seq_id)
        self._copy()
        if self.scheduler.roster.bad_names > self._bad_names:
            self._bad_names = self.scheduler.roster.bad_names
            log.error("block names of %d sequences so far contradict those known here", self._bad_names)
        self.tiers.after_step(step.work)
        self._log.note(self.num_steps, step, done, (self._clock() - started) * 1e3)

    def _execute(self, step: Step) -> Executed:
        chunks = [c for w in step.work if w.sequence.hand_off for c in self._chunk(w)]
        progress = self._progress
        if progress is None or not chunks:
            return self.runner.execute(step.work)
        progress.begin(step.number, chunks)
        done = self.runner.execute(step.work, lambda layer: progress.layer(step.number, layer, self._clock()))
        progress.end(step.number, self._clock())
        return done

    def _chunk(self, work: Work) -> list[Chunk]:
        """Blocks of a hand-off that are final after this work: full ones, and the tail with the end of the prompt."""
        size = self.scheduler.limits.block_size
        first = work.start // size
        stop = len(work.sequence.block_ids) if work.samples else work.stop // size
        return [Chunk(work.sequence.seq_id, first, stop - first, work.samples)] if stop > first else []

    def _copy(self) -> None:
        """Give choices that have just parted their own tails: at once, before anybody can write into the blocks."""
        if copies := self.scheduler.roster.take_copies():
            self.runner.copy_blocks(copies)

    def _emit(self, outputs: Iterable[SequenceOutput], seq_id: str) -> None:
        """Put outputs of one request, with its times, into the next StepDone."""
        times = self._times.get(seq_id)
        if seq_id not in self.scheduler.roster.groups:
            self._times.pop(seq_id, None)
        for output in outputs:
            if times is not None:
                scheduled = times.scheduled_s
                now = self._clock()
                output.queue_ms = ((now if scheduled is None else scheduled) - times.accepted_s) * 1e3
                output.compute_ms = 0.0 if scheduled is None else (now - scheduled) * 1e3
            self._outputs.append(output)

    def _report(self) -> None:
        stored, removed = self.scheduler.roster.pool.take_events()
        outputs, self._outputs, self._changed = tuple(self._outputs), [], False
        self._running_told = self.scheduler.num_running
        tier = self.tiers.take_events()
        self._send(
            StepDone(outputs=outputs, stored=tuple(stored), removed=tuple(removed), stats=self.stats(), tier=tier)
        )


def _scored(output: SequenceOutput, told: Mapping[tuple[str, int], TokenLogprobs]) -> SequenceOutput:
    """An output with the logprobs of its one token, where they were asked for."""
    found = told.get((output.seq_id, output.choice)) if told and output.token_ids else None
    return output if found is None else replace(output, logprobs=(found,))
