"""The router without its fronts, wired together: discovery, links, view, feed, flow, timelines, metrics.

start: feed and discovery ─► links attach ─► ready         stop: no new requests ─► links close ─► tasks end
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.index.base import BlockIndex
from services.config import ServeConfig
from services.live_config import difference, with_live
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import ModelCard
from services.router.admission.gate import Gate
from services.router.admission.slo import misses
from services.router.cluster import cluster_dict
from services.router.deps import Deps
from services.router.discovery import Discovery, RedisSource, Source
from services.router.fabric import FabricMeter
from services.router.feed import Feed
from services.router.fleet import Fleet, FleetSettings
from services.router.flow import Flow
from services.router.health import Health
from services.router.links import GRACE_S, RouterIdentity
from services.router.member import WorkerState
from services.router.record import Recorder
from services.router.switchboard import Switchboard
from services.router.text import context_tokens
from services.router.timeline import Timeline, Timelines
from services.router.view import View
from services.telemetry.metrics import RouterMetrics, WorkerSample

SWEEP_S = 1.0
STEPS_SHOWN = 64

_log = logging.getLogger("pdray.router")


class RouterCore:
    """One router. Construct, `start`, use, `stop`; all on one event loop."""

    def __init__(
        self,
        config: ServeConfig,
        card: ModelCard,
        *,
        index: BlockIndex | None = None,
        sources: Sequence[Source] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index``: the Redis of this application, owned by the caller; None: the router serves on Attach alone."""
        if not config.secret:
            raise ValueError("secret must not be empty: workers refuse unsigned calls")
        self.config = self._built = config
        self._reload_refused = ""
        self.card = card
        self.identity = RouterIdentity(f"router-{secrets.token_hex(4)}", secrets.token_hex(8))
        self.metrics = RouterMetrics(self._samples)
        kept, most = config.router.timelines_kept, 2 * config.router.max_queue + 64
        self.timelines = Timelines(kept, most, clock, on_close=self._closed)
        stall_s = config.worker.stall_s
        self.view = View(card.model_fingerprint, card.tokenizer_fingerprint, stall_s, clock)
        settings = FleetSettings(
            identity=self.identity, secret=config.secret, silence_s=max(stall_s - GRACE_S, GRACE_S)
        )
        self._fleet = Fleet(settings, self.view, self.metrics, clock)
        fabric = FabricMeter(clock, pulls=config.router.pull == "auto")
        self._switchboard = Switchboard(self._fleet.calls, self.timelines, fabric, self.metrics)
        self._fleet.deliveries = self._switchboard
        self._health = Health(
            config.health, self.view, clock, on_open=lambda worker: self.metrics.circuits_opened.labels(worker).inc()
        )
        self.recorder = Recorder(clock)
        self._turns = 0
        self._deps = deps = Deps(
            config=config,
            identity=self.identity,
            view=self.view,
            gate=Gate(config, self.view, self.metrics, clock),
            health=self._health,
            recorder=self.recorder,
            calls=self._fleet.calls,
            switchboard=self._switchboard,
            fabric=fabric,
            metrics=self.metrics,
            clock=clock,
            next_turn=self._next_turn,
        )
        self.max_model_len = context_tokens(card, config.model.max_model_len)
        self.flow = Flow(
            deps, self.timelines, self.max_model_len, card.eos_token_ids, draw_seed=lambda: secrets.randbits(63)
        )
        redis = config.redis
        self._feed = (
            None
            if index is None
            else Feed(index, self.view, self.metrics, clock, kind=redis.kind, max_blocks=redis.max_blocks)
        )
        own = [] if index is None else [RedisSource(index, config.secret, self.metrics)]
        self._discovery = Discovery(config.workers, [*own, *sources], self._fleet.set_addresses)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for workers; returns at once. `ready` says when there is a pair.

        Raises:
            ConfigError: router.record_trace cannot be written.
        """
        if self.config.router.record_trace:
            self.recorder.open(Path(self.config.router.record_trace))
        if self._feed is not None:
            self._feed.start()
        self._discovery.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="fleet-sweep")

    def reconfigure(self, given: Mapping[str, Any]) -> None:
        """Take over live settings (`services.live_config`); requests that come from now on are judged by them.

        Raises:
            ConfigError: a setting that is not live, or an impossible value. Nothing has changed then, and
                /v1/cluster shows why.
        """
        try:
            config = with_live(self._built, given)
        except ConfigError as exc:
            self._reload_refused = str(exc)
            raise
        self.config = self._deps.config = config
        self._deps.gate.reconfigure(config)
        self._reload_refused = ""

    async def drain(self, limit_s: float) -> bool:
        """Refuse what is new and wait for what runs; False where the time was not enough."""
        self.flow.refuse_new()
        return await self.flow.idle(limit_s)

    async def stop(self) -> None:
        """Close all links. Requests that still run are aborted by their workers, which lose this router."""
        self.flow.refuse_new()
        await self._discovery.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._feed is not None:
            await self._feed.stop()
        await self._switchboard.stop()
        await self._fleet.stop()
        await asyncio.to_thread(self.recorder.close)

    # --- what the fronts show ---

    def ready(self) -> tuple[bool, str]:
        self._health.judge()
        return self.view.readiness()

    def cluster(self) -> dict[str, Any]:
        name = self.config.model.served_name or self.card.name
        shown = cluster_dict(self.view, self._fleet, self.redis_mode, name)
        live = {"reloaded": difference(self._built, self.config), "refused": self._reload_refused}
        return shown | {"settings": live}

    def hidden_size(self) -> int:
        if error := self.view.no_pooler():
            raise error
        return min(e.registration.hidden_size for e in self.view.poolers())

    def capacity_tokens(self) -> int:
        return self.view.capacity_tokens()

    @property
    def redis_mode(self) -> str:
        """embedded, external, or down: there is none, or it does not answer."""
        if self._feed is None or not self._feed.up:
            return "down"
        return "embedded" if self.config.redis.is_embedded else "external"

    def request_debug(self, request_id: str) -> dict[str, Any] | None:
        timeline = self.timelines.find(request_id)
        return None if timeline is None else timeline.to_dict()

    async def steps(self, worker_id: str | None = None) -> dict[str, Any]:
        """The last engine steps of one worker, or of all that are attached; one that fails shows its error.

        Raises:
            RequestError: NOT_FOUND for a worker that is not attached.
        """
        ids = [e.worker_id for e in self.view.entries() if e.link_state is WorkerState.READY]
        if worker_id is not None:
            if worker_id not in ids:
                raise RequestError(ErrorCode.NOT_FOUND, f"no worker {worker_id!r} is attached; there are {ids}")
            ids = [worker_id]
        return {"workers": await asyncio.gather(*(self._steps_of(w) for w in ids))}

    def key_refused(self, reason: str) -> None:
        self.metrics.key_refusals.labels(reason).inc()

    def metrics_text(self) -> bytes:
        return self.metrics.text()

    # --- inside ---

    async def _steps_of(self, worker_id: str) -> dict[str, Any]:
        entry, calls = self.view.entry(worker_id), self._fleet.calls(worker_id)
        row: dict[str, Any] = {"worker_id": worker_id, "role": entry.role if entry else ""}
        try:
            if calls is None:
                raise RequestError(ErrorCode.WORKER_LOST, f"{worker_id} has just left")
            return row | {"steps": await calls.steps(STEPS_SHOWN)}
        except RequestError as error:
            return row | {"steps": [], "error": error.message}

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._fleet.sweep()
            self._health.judge()

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns - 1

    def _samples(self) -> Iterable[WorkerSample]:
        for entry in self.view.entries():
            if entry.link_state is WorkerState.READY:
                yield WorkerSample(worker=entry.worker_id, role=entry.role, load=entry.load)

    def _closed(self, timeline: Timeline) -> None:
        """A request ended: everything that metrics say of it."""
        m = self.metrics
        m.requests.labels(timeline.outcome).inc()
        self._judge_targets(timeline)
        times = timeline.times
        ttft_ms, e2e_ms = times.ttft_ms, times.e2e_ms
        if timeline.outcome != "ok" or ttft_ms is None or e2e_ms is None:
            return
        m.prompt_tokens.inc(timeline.prompt_tokens)
        if timeline.is_pooled:
            m.embed_s.observe(e2e_ms / 1000)
            return
        m.cached_tokens.inc(timeline.cached_tokens)
        m.output_tokens.inc(timeline.output_tokens)
        m.ttft_s.observe(ttft_ms / 1000)
        m.e2e_s.observe(e2e_ms / 1000)
        parts = times.first_parts_us
        m.queue_s.observe((parts["router_queue"] + parts["p_queue"]) / 1e6)
        if times.tpot_ms is not None:
            m.tpot_s.observe(times.tpot_ms / 1000)
        if (error := timeline.prediction_error) is not None:
            m.ttft_error.observe(error)

    def _judge_targets(self, timeline: Timeline) -> None:
        """Of a request with targets; one that was refused for them, or that its client ended, is in neither count."""
        if not timeline.slo or timeline.outcome in ("cancelled", str(ErrorCode.OVERLOADED)):
            return
        missed = misses(timeline.slo, timeline.outcome, timeline.times)
        for which, phase in missed.items():
            self.metrics.slo_misses.labels(which, phase).inc()
        if not missed:
            self.metrics.goodput.inc()
