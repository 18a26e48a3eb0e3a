"""One worker as the router sees it: its registration, its latest load, the blocks it holds, and its state.

    connecting ─► ready ◄─► draining | stalled | tripped | refused          lost ◄─ from any of them

`state` is derived: what the link says comes first, then refusal, drain, circuit and stall.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.errors import ConfigError
from services.protocol.proto import worker_pb2
from services.router.compat import Kind, kind_of
from services.router.residency import Residency

HAND_OFF_ROLES = ("prefill", "decode")
ROLES = (*HAND_OFF_ROLES, "mixed")


class WorkerState(StrEnum):
    READY = "ready"
    CONNECTING = "connecting"  # not attached, or in the grace of a broken stream
    DRAINING = "draining"
    STALLED = "stalled"
    TRIPPED = "tripped"  # its circuit is open: see services.router.health
    LOST = "lost"
    REFUSED = "refused"


FULL_CHUNK_TOKENS = 512
"""What a step may hold of prompts, for all that a router knows: twice the default of engine.max_num_batched_tokens."""
SPEED_KEPT = 0.999
"""Of a worker's prefill speed with each load: the last thousand or so count."""
SPEED_NOISE = 5.0
"""How far (as a logarithm) means of one load may lie apart by chance. Steps of one long prompt follow each other, so
this is a few times what single steps show; of n loads it is smaller by the root of n."""


@dataclass(slots=True)
class Progress:
    """Notices work without progress: sequences run, and the engine's step counter stands still."""

    step: int = -1
    moved_s: float = 0.0
    limit_s: float = 5.0
    is_stalled: bool = False
    was_busy: bool = False

    def observe(self, load: worker_pb2.Load, role: str, now_s: float) -> None:
        """A load came in. A prefill worker may hold computed KV for long without a step, so it must say itself."""
        busy = load.running > 0 and role != "prefill"
        if load.step != self.step or not busy or not self.was_busy:
            self.step, self.moved_s = load.step, now_s
        self.was_busy = busy
        rate = load.prefill_tokens_per_s  # its steps may hold a whole chunk of a prompt
        chunk_s = FULL_CHUNK_TOKENS / rate if rate else 0.0
        limit_s = max(self.limit_s, 3 * load.step_ms / 1000, 3 * chunk_s)
        self.is_stalled = load.stalled or now_s - self.moved_s > limit_s


@dataclass(slots=True)
class PrefillSpeed:
    """Prompt tokens per second over many prompts, and how sure that is.

    What a worker reports follows its last few steps, and those are slow or fast with the length of their prompts, since
    attention grows with it. Taken as the worker's own speed it would drive prompts away from whoever had a long one. So
    a worker counts as fast as the others until it is plain that it is not.
    """

    computed_tokens: int = -1  # of the last load; −1 before the first
    tokens: float = 0.0
    seconds: float = 0.0
    loads: float = 0.0

    def observe(self, load: worker_pb2.Load) -> None:
        """A load came in; what was computed since the last one took as long as it reports."""
        fresh = load.prompt_tokens_computed - self.computed_tokens if self.computed_tokens >= 0 else 0
        self.computed_tokens = load.prompt_tokens_computed
        rate = measured(load.prefill_tokens_per_s)
        if fresh > 0 and rate:
            self.tokens = SPEED_KEPT * self.tokens + fresh
            self.seconds = SPEED_KEPT * self.seconds + fresh / rate
            self.loads = SPEED_KEPT * self.loads + 1

    def mean(self, load: worker_pb2.Load) -> float:
        """0 where nothing is known."""
        return self.tokens / self.seconds if self.seconds else measured(load.prefill_tokens_per_s)

    def among(self, usual: float, load: worker_pb2.Load) -> float:
        """Its own where that differs from the ``usual`` one by more than chance would have it, else the usual
        one. What is reported counts as long as nothing was seen to be computed."""
        own = self.mean(load)
        if self.loads and abs(math.log(own / usual)) < SPEED_NOISE / math.sqrt(self.loads):
            return usual
        return own or usual


def measured(value: float) -> float:
    """A worker's measurement, or 0 where it is none."""
    return value if math.isfinite(value) and value > 0 else 0.0


@dataclass(slots=True)
class WorkerEntry:
    """Everything known of one worker id. Replaced by a new entry when another process takes the id."""

    registration: worker_pb2.Registration
    address: str  # where the router reaches it; what it registered may differ
    order: int  # of registration, for deciding which kind came first
    residency: Residency
    progress: Progress
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)
    load_s: float = 0.0
    link_state: WorkerState = WorkerState.CONNECTING  # connecting, lost, or ready for what an attached link leaves open
    link_reason: str = ""
    refusal: str = ""
    tripped: str = ""  # why its circuit lets nothing through
    kind: Kind | None = None

    def __post_init__(self) -> None:
        self.register(self.registration)

    @property
    def worker_id(self) -> str:
        return self.registration.worker_id

    @property
    def epoch(self) -> str:
        return self.registration.epoch

    @property
    def role(self) -> str:
        return self.registration.role

    @property
    def transport(self) -> str:
        """What it hands off by; "" where it hands nothing off."""
        return self.registration.transport if self.role in HAND_OFF_ROLES else ""

    @property
    def state(self) -> WorkerState:
        if self.link_state is not WorkerState.READY:
            return self.link_state
        if self.refusal:
            return WorkerState.REFUSED
        if self.registration.draining:
            return WorkerState.DRAINING
        if self.tripped:
            return WorkerState.TRIPPED
        return WorkerState.STALLED if self.progress.is_stalled else WorkerState.READY

    @property
    def reason(self) -> str:
        """Why the state is not ready; "" where it is."""
        return {
            WorkerState.READY: "",
            WorkerState.CONNECTING: self.link_reason,
            WorkerState.LOST: self.link_reason,
            WorkerState.REFUSED: self.refusal,
            WorkerState.DRAINING: "the worker is stopping",
            WorkerState.TRIPPED: self.tripped,
            WorkerState.STALLED: f"work without progress since step {self.load.step}",
        }[self.state]

    @property
    def own_refusal(self) -> str:
        """What is wrong with this registration whatever the others say."""
        if self.role not in ROLES:
            return f"role {self.role!r} is none of {', '.join(ROLES)}"
        if self.kind is None:
            return self._kind_error()
        return ""

    def register(self, registration: worker_pb2.Registration) -> None:
        """Take a registration of the same epoch: it may have begun to drain."""
        self.registration = registration
        try:
            self.kind = kind_of(registration.fingerprint)
        except ConfigError:
            self.kind = None

    def _kind_error(self) -> str:
        try:
            kind_of(self.registration.fingerprint)
        except ConfigError as exc:
            return str(exc)
        return ""


def new_entry(
    registration: worker_pb2.Registration, address: str, order: int, stall_s: float, clock: Callable[[], float]
) -> WorkerEntry:
    """A worker that has just been described; nothing of an earlier process of that id is carried over."""
    return WorkerEntry(
        registration=registration,
        address=address,
        order=order,
        residency=Residency(max_names=2 * registration.num_blocks + 4096),
        progress=Progress(moved_s=clock(), limit_s=stall_s),
    )
