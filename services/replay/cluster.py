"""One replay: arrivals go through the router's own plan, view, bookings and fabric to simulated workers.

The virtual clock jumps from event to event; equal times keep the order in which they were scheduled. Delays that are
not computed are constants: a submission, a batch of block events until the view has it.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.protocol.errors import RequestError
from services.protocol.proto import worker_pb2
from services.replay.decode import Answer, DecodeWorker
from services.replay.links import Links
from services.replay.prefill import PrefillWorker, Prompt, Step
from services.replay.record import Record, Setting
from services.replay.traffic import Arrival
from services.router.fabric import FabricMeter
from services.router.member import WorkerState
from services.router.plan import Named, plan
from services.router.types import RouterRequest
from services.router.view import View

SUBMIT_S = 0.002
"""From the router's choice to the worker's queue."""
EVENTS_S = 0.07
"""From a change of a pool to the view: the publisher's batch of 50 ms, and the way through the index."""
RATE_WEIGHT = 0.2
"""Of a step in a worker's mean of its prefill rate, as in the engine."""


@dataclass(slots=True)
class _Feed:
    """One worker's block events on their way to the view."""

    seq: int = 0
    is_pending: bool = False
    rate: float = 0.0
    version: int = 0  # of a decode worker's next end


class Replay:
    """Use `run` once."""

    def __init__(self, requests: Sequence[Arrival], setting: Setting) -> None:
        self.setting = setting
        self.records = [Record(arrival=r) for r in requests]
        self._by_id = {r.request_id: r for r in self.records}
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._turn = 0
        self._rng = random.Random(setting.seed)
        self.view = View("", "", 1e9, lambda: self.now_s)
        self.fabric = FabricMeter(lambda: self.now_s, pulls=setting.pulls)
        self.links = Links(setting.costs)
        costs, size = setting.costs, setting.block_size
        self.prefills = {f"p{i:02}": PrefillWorker.of(costs, size) for i in range(setting.prefill)}
        self.decodes = {f"d{i:02}": DecodeWorker.of(costs, size) for i in range(setting.decode)}
        self._feeds = {name: _Feed() for name in (*self.prefills, *self.decodes)}
        for name in self._feeds:
            self._register(name)
        kind = self.view.kind()
        assert kind is not None, "a replay has a prefill and a decode worker"
        self._kind = kind

    def run(self) -> list[Record]:
        """All requests from their arrival to their last token."""
        for record in self.records:
            self._at(record.arrival.at_s, self._arrive, record)
        while self._events:
            self.now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        return self.records

    # --- the router ---

    def _arrive(self, record: Record) -> None:
        arrival = record.arrival
        ids = cast("tuple[int, ...]", range(arrival.num_tokens))  # only how many they are is looked at
        request = RouterRequest(request_id=record.request_id, prompt_ids=ids, received_s=self.now_s)
        named = Named(request, self._kind, b"", list(arrival.names))
        draw = self._rng.random
        ask = (self.setting.policy, self._turn, (draw(), draw(), draw(), draw()))
        self._turn += 1
        try:
            record.plan = plan(named, self.view, self.fabric, ask, ())
        except RequestError:
            return
        if record.plan is None:
            return
        self.view.bookings.book(record.request_id, record.plan.booking)
        self.view.routed(set(record.pair), named.names)
        self._at(self.now_s + SUBMIT_S, self._submit, record)

    # --- prefill ---

    def _submit(self, record: Record) -> None:
        assert record.plan is not None
        choice, arrival = record.plan.decision.choice, record.arrival
        held = choice.held_blocks if choice.holder_id else 0
        record.prompt = Prompt(record.request_id, arrival.num_tokens, arrival.names, held_blocks=held)
        self.prefills[record.pair[0]].submit(record.prompt)
        self._work(record.pair[0])

    def _work(self, name: str) -> None:
        """Begin the next step if there is one to begin."""
        worker = self.prefills[name]
        if not worker.is_busy:
            for prompt in worker.place(self.setting.costs.chunk_tokens):
                self._placed(name, self._by_id[prompt.request_id], prompt)
            step = worker.begin(self.now_s)
            if step is not None:
                self._at(self.now_s + step.duration_ms / 1000, self._step_over, name, step)
        self._tell(name)

    def _placed(self, name: str, record: Record, prompt: Prompt) -> None:
        arrival = record.arrival
        record.placed_s = self.now_s
        if prompt.request_id in self.prefills[name].loading:
            self._load(name, record, prompt)
        record.cached_tokens = prompt.cached_tokens
        record.answer = Answer(record.request_id, arrival.num_tokens, arrival.output_tokens, arrival.names)
        self.decodes[record.pair[1]].reserve(record.answer)
        self._grant(record.pair[1])

    def _load(self, name: str, record: Record, prompt: Prompt) -> None:
        """KV comes from the holder, as far as it still has it."""
        assert record.plan is not None
        holder_id = record.plan.decision.choice.holder_id
        holder = self.prefills.get(holder_id) or self.decodes[holder_id]
        there = holder.pool.lookup(prompt.names[: prompt.held_blocks]) * self.setting.block_size
        prompt.loaded_tokens = max(0, there - prompt.cached_tokens)
        if not prompt.loaded_tokens:
            self.prefills[name].loaded(prompt.request_id)
            return
        record.loaded_tokens = prompt.loaded_tokens
        done_s = self.links.move((holder_id, name), prompt.loaded_tokens, self.now_s)
        self._at(done_s, self._loaded, name, record, holder_id, 1000 * (done_s - self.now_s))

    def _loaded(self, name: str, record: Record, holder_id: str, wire_ms: float) -> None:
        assert record.prompt is not None
        self.fabric.observe_pull((holder_id, name), record.loaded_tokens * self.setting.costs.token_bytes, wire_ms)
        self.prefills[name].loaded(record.request_id)
        self._work(name)

    def _step_over(self, name: str, step: Step) -> None:
        worker, feed = self.prefills[name], self._feeds[name]
        rate = 1000 * sum(tokens for _, tokens in step.chunks) / step.duration_ms
        feed.rate += RATE_WEIGHT * (rate - feed.rate) if feed.rate else rate
        for prompt in worker.end(step):
            record = self._by_id[prompt.request_id]
            record.first_token_s = self.now_s
            self.view.bookings.prefill_done(record.request_id)
            if record.granted_s >= 0:
                self._hand_off(record)
        self._work(name)

    # --- hand-off and decode ---

    def _grant(self, name: str) -> None:
        for answer in self.decodes[name].grants():
            record = self._by_id[answer.request_id]
            record.granted_s = self.now_s
            record.missing_tokens = answer.num_tokens - answer.cached_blocks * self.setting.block_size
            if record.first_token_s >= 0:
                self._hand_off(record)
        self._tell(name)

    def _hand_off(self, record: Record) -> None:
        """Prompt and blocks are there: when is the rest of the KV?"""
        assert record.prompt is not None
        start_s = max(record.granted_s, record.prompt.started_s)
        done_s = self.links.hand_off(record.pair, record.missing_tokens, start_s, record.first_token_s)
        self._at(max(done_s, self.now_s), self._commit, record)

    def _commit(self, record: Record) -> None:
        assert record.prompt is not None
        assert record.answer is not None
        (p, d), moved = record.pair, record.missing_tokens * self.setting.costs.token_bytes
        record.joined_s = self.now_s
        self.prefills[p].release(record.request_id)
        if record.granted_s <= record.first_token_s:  # else the wait was for blocks
            computed_ms = 1000 * (record.first_token_s - record.prompt.started_s)
            self.fabric.observe((p, d), moved, computed_ms, 1000 * (self.now_s - record.first_token_s))
        self.decodes[d].join(record.answer, self.now_s)
        self._work(p)
        self._tell(d)
        self._next_end(d)

    def _next_end(self, name: str) -> None:
        feed, end_s = self._feeds[name], self.decodes[name].next_end_s()
        feed.version += 1
        if end_s is not None:
            self._at(end_s, self._finish, name, feed.version)

    def _finish(self, name: str, version: int) -> None:
        if version != self._feeds[name].version:
            return
        for answer in self.decodes[name].finish(self.now_s):
            record = self._by_id[answer.request_id]
            record.end_s = self.now_s
            self.view.bookings.release(record.request_id)
            self.view.routed({name}, record.arrival.names)
        self._grant(name)
        self._next_end(name)

    # --- what workers tell ---

    def _tell(self, name: str) -> None:
        """A load goes to the view at once, block events a little later."""
        load = self._prefill_load(name) if name in self.prefills else self._decode_load(name)
        self.view.loaded(name, load)
        feed = self._feeds[name]
        if not feed.is_pending:
            feed.is_pending = True
            self._at(self.now_s + EVENTS_S, self._publish, name)

    def _prefill_load(self, name: str) -> worker_pb2.Load:
        worker, counts = self.prefills[name], self.prefills[name].pool.counts()
        return worker_pb2.Load(
            step=worker.steps,
            running=len(worker.placed),
            waiting=len(worker.waiting),
            waiting_prefill_tokens=worker.missing_tokens,
            prompt_tokens_computed=worker.tokens_computed,
            prefill_tokens_per_s=self._feeds[name].rate,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_used=counts.used,
        )

    def _decode_load(self, name: str) -> worker_pb2.Load:
        worker, counts = self.decodes[name], self.decodes[name].pool.counts()
        worker.advance(self.now_s)
        return worker_pb2.Load(
            step=int(worker.steps),
            running=len(worker.active),
            waiting=len(worker.waiting) + worker.granted,
            step_ms=worker.step_ms if worker.active else 0.0,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_used=counts.used,
            blocks_reserved=counts.reserved,
        )

    def _publish(self, name: str) -> None:
        feed = self._feeds[name]
        feed.is_pending = False
        worker = self.prefills.get(name) or self.decodes[name]
        stored, removed = worker.pool.take_events()
        if stored or removed:
            feed.seq += 1
            entry = self.view.entry(name)
            assert entry is not None
            assert entry.residency.apply(feed.seq, [block for block, _ in stored], removed)

    def _register(self, name: str) -> None:
        costs, size = self.setting.costs, self.setting.block_size
        group = {
            "num_layers": costs.num_layers, "num_kv_heads": 1, "head_dim": costs.token_bytes // (4 * costs.num_layers),
            "block_size": size, "dtype": "bfloat16",
        }  # fmt: skip
        registration = worker_pb2.Registration(
            worker_id=name,
            role="prefill" if name in self.prefills else "decode",
            epoch="e",
            fingerprint=worker_pb2.Fingerprint(
                model="replay",
                tokenizer="replay",
                dtype="bfloat16",
                block_size=size,
                layout_version=1,
                geometry_json=json.dumps({"groups": [group], "num_blocks": [costs.cache_tokens // size]}),
            ),
            num_blocks=costs.cache_tokens // size,
            transport="replay",
        )
        self.view.registered(registration, name)
        self.view.link_is(name, WorkerState.READY)
        entry = self.view.entry(name)
        assert entry is not None
        entry.residency.reset(0, ())

    def _at(self, at_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (at_s, self._scheduled, act, arguments))
