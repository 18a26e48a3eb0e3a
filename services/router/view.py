"""What the router knows of its cluster, and the immutable extract of it that the policy decides on.

Fed by links (registration, load, state), by the index (block sets) and by the flow (bookings, prompts just routed).
Reading it costs no round trip anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.bookings import Bookings
from services.router.compat import Kind, Member, refusals
from services.router.member import HAND_OFF_ROLES, WorkerEntry, WorkerState, measured, new_entry
from services.router.policy import Worker
from services.router.residency import Residency, depths

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
"""Assumed of every worker until one has measured its own."""
DEFAULT_STEP_MS = 20.0
RETRY_AFTER_S = 1.0


class View:
    """Only the event loop touches it. ``model`` and ``tokenizer`` are the fingerprints of the router's own card."""

    def __init__(self, model: str, tokenizer: str, stall_s: float, clock: Callable[[], float]) -> None:
        self.bookings = Bookings()
        self._model = model
        self._tokenizer = tokenizer
        self._stall_s = stall_s
        self._clock = clock
        self._entries: dict[str, WorkerEntry] = {}
        self._registered = 0

    # --- fed by links ---

    def registered(self, registration: worker_pb2.Registration, address: str) -> None:
        """A worker is there, or its registration changed."""
        entry = self._entries.get(registration.worker_id)
        if entry is None or entry.epoch != registration.epoch:
            self._registered += 1
            entry = new_entry(registration, address, self._registered, self._stall_s, self._clock)
            self._entries[registration.worker_id] = entry
        entry.address = address
        entry.register(registration)
        self._judge()

    def link_is(self, worker_id: str, state: WorkerState, reason: str = "") -> None:
        """``state``: READY (attached), CONNECTING or LOST."""
        entry = self._entries.get(worker_id)
        if entry is not None:
            entry.link_state, entry.link_reason = state, reason
            self._judge()

    def loaded(self, worker_id: str, load: worker_pb2.Load) -> None:
        """A load came in, after the outputs of the same message."""
        entry = self._entries.get(worker_id)
        if entry is not None:
            now = self._clock()
            entry.load, entry.load_s = load, now
            entry.progress.observe(load, entry.role, now)
            entry.speed.observe(load)
            self.bookings.load_came(worker_id, load.prompt_tokens_computed)

    def dropped(self, worker_id: str) -> None:
        """Nothing lists the worker any more."""
        self._entries.pop(worker_id, None)
        self.bookings.load_came(worker_id)
        self._judge()

    # --- fed by the flow ---

    def routed(self, worker_ids: Collection[str], names: Sequence[bytes]) -> None:
        """A prompt goes to these workers: until their events say so, it counts as cached there for a short while."""
        for worker_id in worker_ids:
            if entry := self._entries.get(worker_id):
                entry.residency.expect(names, self._clock())

    # --- read ---

    def entry(self, worker_id: str) -> WorkerEntry | None:
        return self._entries.get(worker_id)

    def entries(self) -> list[WorkerEntry]:
        """By worker id."""
        return sorted(self._entries.values(), key=lambda e: e.worker_id)

    def residencies(self) -> Mapping[tuple[str, str], Residency]:
        """Block sets to be kept up to date, by worker id and epoch."""
        attached = [e for e in self._entries.values() if e.link_state is WorkerState.READY]
        return {(e.worker_id, e.epoch): e.residency for e in attached}

    def kind(self) -> Kind | None:
        """What the workers that may serve have in common; None while there are none."""
        ready = [e for e in self._entries.values() if e.state is WorkerState.READY]
        return min(ready, key=lambda e: e.order).kind if ready else None

    def candidates(self, names: Sequence[bytes], avoid: Collection[str] = ()) -> tuple[Worker, ...]:
        """The ready workers, for one prompt with these block names: cached depth, queue and room, bookings included."""
        now = self._clock()
        ready = [e for e in self._entries.values() if e.state is WorkerState.READY]
        rates = [rate for e in ready if (rate := e.speed.mean(e.load))]
        usual = sum(rates) / len(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S
        chosen = sorted((e for e in ready if e.worker_id not in avoid), key=lambda e: e.worker_id)
        cached = depths([e.residency for e in chosen], names, now)
        rows = zip(chosen, cached, strict=True)
        return tuple(self._worker(e, depth, e.residency.lower_depths(names, depth), usual) for e, depth in rows)

    def readiness(self) -> tuple[bool, str]:
        """Whether a pair or a mixed worker could take a request now, and if not, why."""
        error = self.no_pair()
        return (True, "") if error is None else (False, error.message)

    def capacity_tokens(self) -> int:
        """What the largest worker that could hold an answer has KV for; 0 where none is attached."""
        holders = [e for e in self.entries() if e.state is WorkerState.READY and e.role in ("decode", "mixed")]
        sizes = [e.registration.num_blocks * e.registration.fingerprint.block_size for e in holders]
        return max(sizes, default=0)

    def no_pair(self) -> RequestError | None:
        """NO_WORKERS or INCOMPATIBLE_WORKERS where no request can be served, with the reason; else None."""
        if _serves({e.role for e in self._entries.values() if e.state is WorkerState.READY}):
            return None
        entries = self.entries()
        refused = [e for e in entries if e.state is WorkerState.REFUSED]
        usable = {e.role for e in entries if e.state in (WorkerState.READY, WorkerState.REFUSED)}
        if refused and _serves(usable):
            reasons = "; ".join(e.refusal for e in refused)
            return RequestError(
                ErrorCode.INCOMPATIBLE_WORKERS, f"no compatible pair of prefill and decode workers: {reasons}"
            )
        counts = Counter(f"{e.role} {e.state}" for e in entries)
        there = ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "none has registered"
        return RequestError(
            ErrorCode.NO_WORKERS,
            f"no prefill and decode worker, and no mixed worker, is ready: {there}",
            retry_after_s=RETRY_AFTER_S,
        )

    def poolers(self) -> list[WorkerEntry]:
        """Ready workers that compute prompts and give their hidden states."""
        return [e for e in self._prompt_workers() if e.registration.hidden_size]

    def no_pooler(self) -> RequestError | None:
        """NO_WORKERS where no prompt can be computed now, NOT_YET_SUPPORTED where no worker gives hidden states."""
        if self.poolers():
            return None
        if there := self._prompt_workers():
            names = ", ".join(e.worker_id for e in there)
            text = f"there are no embeddings and no scores: the model's path on {names} gives no hidden states"
            return RequestError(ErrorCode.NOT_YET_SUPPORTED, text)
        text = "no prefill worker, and no mixed worker, is ready"
        return RequestError(ErrorCode.NO_WORKERS, text, retry_after_s=RETRY_AFTER_S)

    def _prompt_workers(self) -> list[WorkerEntry]:
        return [e for e in self.entries() if e.state is WorkerState.READY and e.role in ("prefill", "mixed")]

    def _worker(self, e: WorkerEntry, cached_blocks: int, tier_blocks: Mapping[str, int], usual_rate: float) -> Worker:
        load, booked = e.load, self.bookings
        return Worker(
            worker_id=e.worker_id,
            role=e.role,
            cached_blocks=cached_blocks,
            tier_blocks=tier_blocks,
            queued_tokens=booked.queued_tokens(e.worker_id, load.waiting_prefill_tokens),
            prefill_tokens_per_s=e.speed.among(usual_rate, e.load),
            active_sequences=booked.active_sequences(e.worker_id, load.running + load.waiting),
            step_ms=measured(load.step_ms) or DEFAULT_STEP_MS,
            free_blocks=booked.free_blocks(
                e.worker_id, load.blocks_free + load.blocks_cached if load.blocks_total else e.registration.num_blocks
            ),
            num_blocks=e.registration.num_blocks,
            full_share=1 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0,
            transport=e.registration.transport,
        )

    def _judge(self) -> None:
        """Decide anew which workers are refused: the first kind to register, of those that are there, stays."""
        present = sorted(
            (e for e in self._entries.values() if e.link_state is not WorkerState.LOST), key=lambda e: e.order
        )
        members = [
            Member(
                e.worker_id,
                e.kind,
                e.transport,
                tuple(e.registration.spare_transports),
                e.registration.fingerprint.protocol_version,
            )
            for e in present
            if e.kind is not None and not e.own_refusal
        ]
        reasons = refusals(members, self._model, self._tokenizer)
        for entry in present:
            entry.refusal = entry.own_refusal or reasons.get(entry.worker_id, "")


def _serves(roles: Collection[str]) -> bool:
    return "mixed" in roles or all(role in roles for role in HAND_OFF_ROLES)
