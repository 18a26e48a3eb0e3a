"""One worker without its network: live requests, the two children, the outboxes and the role, wired together.

gRPC service ─► WorkerCore ─► engine child     AddSequence, ReserveSequence, … ─► StepDone
                    │    └──► transfer child   OpenTicket, Verify, …           ─► Pushed, Verified, …
                    ├──► Role (writer | reader)
                    ├──► AttachHub ─► routers
                    └──► Publisher ─► index
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.errors import FailureKind
from kvstore.geometry import KVGeometry
from kvstore.transfer import messages as t
from kvstore.transfer.several import first_common
from services.config import ServeConfig
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.worker.attach import AttachHub, RouterKey
from services.worker.live import LiveRequest, LiveRequests
from services.worker.role import Role
from services.worker.translate import to_error, to_load, to_output

_log = logging.getLogger("pdray.worker")


class WorkerCore:
    """State of one worker. Everything runs on one event loop; `send_*` never block."""

    def __init__(
        self,
        config: ServeConfig,
        registration: worker_pb2.Registration,
        role: Callable[[WorkerCore], Role],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.registration = registration
        self.clock = clock
        self.stats = m.Stats()
        self.transfer_failures: Counter[str] = Counter()  # by kvstore.errors.FailureKind
        self.requests = LiveRequests(clock)
        self.hub = AttachHub(self._registration, self.load, self._router_lost, clock)
        self.send_engine: Callable[[Any], None] = _not_started
        self.send_transfer: Callable[[Any], None] = _not_started
        self.kill_transfer: Callable[[], None] = lambda: None
        self.transfer_up = asyncio.Event()  # cleared while the transfer child is being started again
        self.transfer_up.set()
        self.geometry = KVGeometry.from_dict(json.loads(registration.fingerprint.geometry_json))
        self.on_blocks: Callable[[Sequence[bytes], Sequence[bytes], int, bool], None] = lambda *_: None
        self.draining = False
        self.pulls = self.pulls_failed = self.pulled_blocks = 0  # of KV that this worker asked others for
        self.last_progress_s = clock()
        self.longest_step_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: deque[asyncio.Future[str]] = deque()  # asked of the engine, oldest first
        self.role = role(self)

    # --- what is known ---

    def _registration(self) -> worker_pb2.Registration:
        return self.registration

    def load(self) -> worker_pb2.Load:
        """The engine's last statistics, as routers see them."""
        return to_load(
            self.stats,
            transfer_failures=self.transfer_failures,
            pulls=self.pulls,
            pulls_failed=self.pulls_failed,
            pulled_blocks=self.pulled_blocks,
            stalled=self.stalled(),
        )

    def stalled(self) -> bool:
        """The engine, which answers a ping between two steps, is silent past the limit and past three full steps."""
        rate = self.stats.prefill_tokens_per_s
        predicted_s = self.config.engine.max_num_batched_tokens / rate if rate else 0.0
        limit_s = max(self.config.worker.stall_s, 3 * self.longest_step_s, 3 * predicted_s)
        return self.clock() - self.last_progress_s > limit_s

    def choose_transport(self, theirs: str, spares: Sequence[str]) -> str:
        """What a writer that has these comes by. Raises RequestError, naming both lists, where we have none of them."""
        there = (theirs, *spares)
        here = (self.registration.transport, *self.registration.spare_transports)
        if chosen := first_common(there, here):
            return chosen
        raise RequestError(
            ErrorCode.INCOMPATIBLE_WORKERS,
            f"prefill and decode worker differ in transport: {' or '.join(map(repr, there))} there, "
            f"{' or '.join(map(repr, here))} here",
        )

    # --- from routers ---

    async def submit(self, request: worker_pb2.SubmitRequest) -> None:
        """Admit one attempt. Raises RequestError."""
        if self.draining:
            raise RequestError(ErrorCode.WORKER_LOST, f"worker {self.registration.worker_id} is draining")
        self.check_fits(request.request)
        live = self.requests.open(request.request)
        live.computes_here = request.compute_here
        live.source = request.source if request.HasField("source") else None
        try:
            await self.role.submit(live, request.reader if request.HasField("reader") else None)
        except RequestError:
            self.requests.close(live.seq_id)
            raise

    def check_fits(self, request: worker_pb2.Request) -> None:
        """Raise RequestError for a request that this worker could never hold."""
        limit = self.registration.max_model_len
        length = len(request.prompt_ids)
        if not length:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
        length += max((len(o.token_ids) for o in request.outputs), default=len(request.output_ids))
        most = limit if request.pools else limit - 1
        if length > most:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"there are {length} tokens before the next one, this worker takes {most}",
            )

    async def drop_choices(self, request_id: str, attempt: int, choices: Collection[int]) -> None:
        """These choices of an attempt are not wanted any more; it ends with the last one."""
        live = self.requests.find(request_id)
        if live is None or live.request.attempt != attempt:
            return
        dropped = live.open_choices.intersection(choices)
        live.open_choices -= dropped
        if not live.open_choices:
            await self.end(live, "no choice is wanted any more")
            return
        for choice in dropped:
            self.role.drop_choice(live, choice)

    async def abort(self, request_id: str, attempt: int, reason: str) -> None:
        """End this and lower attempts, now or whenever they arrive."""
        for live in self.requests.forbid(request_id, attempt, for_s=self.config.budget.total_s):
            await self.end(live, reason)

    async def end(self, live: LiveRequest, reason: str) -> None:
        """The role lets go of one attempt; no output of it reaches a router any more."""
        self.requests.close(live.seq_id)
        await self.role.abort(live, reason)

    async def fail(self, live: LiveRequest, error: RequestError) -> None:
        """End one attempt and tell its router why."""
        self.emit_error(live, error)
        await self.end(live, error.message)

    # --- towards routers ---

    def emit_error(self, live: LiveRequest, error: RequestError) -> None:
        self.hub.add_output(
            live.router,
            worker_pb2.Output(
                request_id=live.request.request_id,
                attempt=live.request.attempt,
                position=live.tokens,
                finish_reason="error",
                error=to_error(error),
            ),
        )

    def emit_event(self, live: LiveRequest, name: str, **detail: Any) -> None:
        """One arrow of the request's life, for its timeline."""
        self.hub.add_event(
            live.router,
            worker_pb2.TimelineEvent(
                request_id=live.request.request_id,
                attempt=live.request.attempt,
                name=name,
                at_ms=(self.clock() - live.accepted_s) * 1000,
                detail_json=json.dumps(detail) if detail else "",
            ),
        )

    def emit_tokens(self, live: LiveRequest, output: m.SequenceOutput, times: worker_pb2.StageTimes | None) -> None:
        live.emitted[output.choice] = output.position + len(output.token_ids)
        self.hub.add_output(live.router, to_output(live, output, times))

    # --- from the children ---

    def on_engine(self, message: Any) -> None:
        """Any message of the engine child after EngineReady."""
        if isinstance(message, m.StepDone):
            self._on_step(message)
        elif isinstance(message, m.Steps):
            future = self._steps.popleft()
            if not future.done():
                future.set_result(message.json)
        elif isinstance(message, m.LoadEnded):
            self._on_load(message)
        else:
            self.role.on_engine(message)
        self.last_progress_s = self.clock()

    def on_transfer(self, message: Any) -> None:
        """Any message of the transfer child after Started; failures are counted here, whatever becomes of them."""
        if isinstance(message, t.TransfersFailed):
            self.transfer_failures[message.kind] += message.count
            _log.warning("%d× %s failed towards %s %s", message.count, message.kind, message.worker_id, message.message)
            return
        if isinstance(message, t.Verified) and message.bad:
            self.transfer_failures[FailureKind.EXTENT] += len(message.bad)
        self.role.on_transfer(message)

    async def steps(self, last: int) -> str:
        """The engine's last steps as JSON; waits for the end of the step under way, 5 s at most."""
        return await asyncio.wait_for(self._ask_steps(last), 5.0)

    def ping_engine(self) -> None:
        """Ask for a sign of life; called each second."""
        if len(self._steps) < 16:
            self._ask_steps(0)

    def _ask_steps(self, last: int) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._steps.append(future)
        self.send_engine(m.GetSteps(last=last))
        return future

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        """A task of this worker; its failure is logged, and it is cancelled at stop."""
        task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    async def sweep(self) -> None:
        """Budgets and detached routers; called several times a second."""
        self.hub.sweep()
        for live in self.requests.overdue():
            self.emit_event(live, "budget_spent")
            await self.fail(
                live,
                RequestError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"the request's {live.request.remaining_ms} ms were spent on this worker",
                ),
            )

    async def fail_all(self, error: RequestError) -> None:
        for live in self.requests.all():
            self.emit_error(live, error)
            self.requests.close(live.seq_id)

    async def stop(self) -> None:
        await self.role.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_step(self, done: m.StepDone) -> None:
        now = self.clock()
        if done.stats.step > self.stats.step:
            self.longest_step_s = max(self.longest_step_s * 0.99, min(now - self.last_progress_s, 60.0))
        is_news = done.stats != self.stats and not (done.stats.running or done.stats.waiting)
        self.stats = done.stats
        for output in done.outputs:
            self._on_output(output)
        for change in done.changes():
            self.on_blocks(*change)
        self.hub.flush()
        if is_news:
            self.hub.tell_load()  # what an abort or a fence freed is seen at once, though no step follows

    def _on_output(self, output: m.SequenceOutput) -> None:
        live = self.requests.get(output.seq_id)
        if live is None:
            return  # the role, which was told, ends it in the engine: it alone knows whether its blocks are being read
        if output.finish_reason == "error":
            code = ErrorCode(output.error_code) if output.error_code else ErrorCode.INTERNAL
            self.spawn(self.fail(live, RequestError(code, output.error)), "fail")
            return
        if output.choice not in live.open_choices:
            return  # it was dropped
        if output.finish_reason:
            live.open_choices.discard(output.choice)
        if self.role.on_output(live, output):
            self.emit_event(live, "finished", reason=output.finish_reason, tokens=live.tokens)
            self.requests.close(live.seq_id)

    def _on_load(self, ended: m.LoadEnded) -> None:
        live = self.requests.get(ended.seq_id)
        if live is not None:
            self.emit_event(
                live,
                "kv_loaded",
                source=ended.source,
                blocks=ended.count,
                wanted_blocks=ended.wanted,
                duration_ms=round(ended.duration_ms, 3),
            )

    def _router_lost(self, router: RouterKey) -> None:
        for live in self.requests.of_router(router):
            self.spawn(self.end(live, "its router is lost"), "router-lost")

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("task %s failed", task.get_name(), exc_info=task.exception())


def _not_started(_message: Any) -> None:
    raise AssertionError("the worker's children are not started")
