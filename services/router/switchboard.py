"""Takes what workers send to the requests it belongs to, and answers what belongs to none with Abort.

Attach ─► deliver ─┬─ a live request's attempt ─► its Exchange, its Timeline
                   └─ unknown or older attempt ─► Abort, once ─► dropped, counted
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from services.protocol.errors import RequestError
from services.protocol.handoff import ARROWS, HandoffState
from services.protocol.proto import worker_pb2
from services.router.calls import WorkerCalls
from services.router.exchange import Exchange
from services.router.fabric import FabricMeter
from services.router.ladder import Rung
from services.router.timeline import COMMITTED, Timelines
from services.telemetry.metrics import RouterMetrics

ARROW_NAMES = frozenset(ARROWS.values())
RESENDING = ARROWS[HandoffState.VERIFYING, HandoffState.RECEIVING]
MAX_ABORTS_REMEMBERED = 8192
MAX_PENDING_ABORTS = 4096
"""Aborts kept for one worker that cannot be reached."""

_log = logging.getLogger("pdray.router")


class Switchboard:
    """All live requests of this router. Only the event loop touches it."""

    def __init__(
        self,
        calls: Callable[[str], WorkerCalls | None],
        timelines: Timelines,
        fabric: FabricMeter,
        metrics: RouterMetrics,
    ) -> None:
        """``calls``: the calls of a worker that is attached now, else None."""
        self._calls = calls
        self._timelines = timelines
        self._fabric = fabric
        self._metrics = metrics
        self._live: dict[str, Exchange] = {}
        self._aborted: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._pending: dict[
            str, dict[str, int]
        ] = {}  # worker id -> request id -> attempt, to be aborted when it is back
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def background_tasks(self) -> int:
        """Aborts under way; each ends within its call's deadline."""
        return len(self._tasks)

    def add(self, exchange: Exchange) -> None:
        self._live[exchange.request_id] = exchange

    def remove(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def deliver(self, worker_id: str, message: worker_pb2.WorkerMessage) -> None:
        """Hand over one message's outputs, hand-offs and events; never waits."""
        for event in message.events:
            if event.name in ARROW_NAMES:
                self._metrics.handoff_moves.labels(event.name, worker_id).inc()
            timeline = self._timelines.find(event.request_id)
            if event.name == RESENDING and (live := self._live.get(event.request_id)) and live.prefill_id == worker_id:
                self._metrics.rungs.labels(str(Rung.RESEND)).inc()
            if timeline is not None:
                timeline.worker_event(worker_id, event)
        for output in message.outputs:
            self._output(worker_id, output)
        for report in message.handoffs:
            self._handoff(worker_id, report)
        for pull in message.pulls:
            self._fabric.observe_pull((pull.holder_id, worker_id), pull.bytes, pull.wire_ms)

    def fail_worker(self, worker_id: str, error: RequestError) -> None:
        """Every attempt that needs this worker is over."""
        for exchange in list(self._live.values()):
            exchange.on_worker_lost(worker_id, error)

    def drop_choice(self, worker_id: str, request_id: str, attempt: int, choice: int) -> None:
        """Tell a worker, in the background, that one choice is not wanted any more.

        Where that gets lost the choice runs to its end, and what comes of it is ignored.
        """
        request = worker_pb2.AbortRequest(
            request_id=request_id, attempt=attempt, reason="a stop string ended the choice", choices=[choice]
        )
        if (calls := self._calls(worker_id)) is not None:
            self._spawn(self._send_abort(calls, worker_id, request))

    def abort(self, worker_ids: Iterable[str], request_id: str, attempt: int, reason: str) -> None:
        """Tell workers, in the background, that this and lower attempts are over; one that is away, when it is back."""
        request = worker_pb2.AbortRequest(request_id=request_id, attempt=attempt, reason=reason)
        for worker_id in worker_ids:
            self._remember(worker_id, request_id, attempt)
            calls = self._calls(worker_id)
            if calls is None:
                self._postpone(worker_id, request)
            else:
                self._spawn(self._send_abort(calls, worker_id, request))

    def worker_is_back(self, worker_id: str) -> None:
        """The worker is attached again, as the same process: tell it what ended meanwhile."""
        for request_id, attempt in self._pending.pop(worker_id, {}).items():
            self.abort([worker_id], request_id, attempt, "ended while the worker was away")

    def worker_is_new(self, worker_id: str) -> None:
        """Another process: it knows none of our requests."""
        self._pending.pop(worker_id, None)

    async def stop(self) -> None:
        """Wait for the aborts under way; each has its own deadline."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _output(self, worker_id: str, output: worker_pb2.Output) -> None:
        exchange = self._live.get(output.request_id)
        if exchange is not None and exchange.accepts(worker_id, output.attempt):
            exchange.on_output(worker_id, output)
            return
        self._metrics.stale_tokens.inc()
        ended = bool(output.finish_reason)  # nothing runs there any more
        if not ended and (worker_id, output.request_id, output.attempt) not in self._aborted:
            self.abort([worker_id], output.request_id, output.attempt, "this attempt is over")

    def _handoff(self, worker_id: str, report: worker_pb2.HandoffReport) -> None:
        """The report of a request that has ended still belongs into its timeline."""
        if report.state == COMMITTED:
            self._metrics.handoff_bytes.labels(report.transport).inc(report.bytes)
        timeline = self._timelines.find(report.request_id)
        if timeline is not None:
            timeline.handoff_report(report)
            if report.state == COMMITTED and timeline.attempts and not timeline.is_migrated:
                decode_id = timeline.attempts[-1].decode
                self._fabric.observe((worker_id, decode_id), report.bytes, *timeline.transfer)
        exchange = self._live.get(report.request_id)
        if exchange is None and report.state != COMMITTED:
            self.abort([worker_id], report.request_id, report.attempt, "the request is over")  # it keeps the KV for us
        if exchange is not None and exchange.accepts(worker_id, report.attempt):
            exchange.on_handoff(report)

    def _remember(self, worker_id: str, request_id: str, attempt: int) -> None:
        self._aborted[(worker_id, request_id, attempt)] = None
        while len(self._aborted) > MAX_ABORTS_REMEMBERED:
            self._aborted.popitem(last=False)

    def _postpone(self, worker_id: str, request: worker_pb2.AbortRequest) -> None:
        waiting = self._pending.setdefault(worker_id, {})
        if len(waiting) < MAX_PENDING_ABORTS or request.request_id in waiting:
            waiting[request.request_id] = max(request.attempt, waiting.get(request.request_id, 0))

    async def _send_abort(self, calls: WorkerCalls, worker_id: str, request: worker_pb2.AbortRequest) -> None:
        try:
            await calls.abort(request)
        except RequestError as exc:
            _log.info("abort of %s did not reach %s: %s", request.request_id, worker_id, exc.message)
            if not request.choices:
                self._postpone(worker_id, request)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="abort")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
