"""Which workers serve a request: a pure function from what is known to an explained decision.

    cost(P, D) = queue(P) + load(H→P) + uncached_tokens / prefill_rate(P)
               + max(0, missing_bytes(D) / bandwidth(P→D) − overlap) + admission(D) + pressure(D)
    load(H→P)  = set-up + loaded_bytes / bandwidth(H→P)       where some holder H has more of the prompt than P
    cost(M)    = queue(M) + uncached_tokens / prefill_rate(M) + admission(M) + pressure(M)     for a mixed worker

All in ms to first token. The least cost wins; ties go to the lower worker ids, prefill first. KV is loaded where that
is faster than computing it, from the holder with which the pair is cheapest; ties go to D itself. `pressure` is no time
of this request: it prices what a sequence more costs those that already decode there, in the same unit. Layers move
while later ones are computed, so all but the last layer's share of the computing hides the transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

PRESSURE_STEPS = 1 / 16
"""Price of one active sequence on the decode worker, in its decode steps."""
_Key = tuple[float, str, str, int, str]  # cost, prefill worker, decode worker or "", rank of the holder, holder or ""
SHOWN_CANDIDATES = 16
"""Candidates kept in a decision, cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy needs of a request."""

    num_tokens: int
    block_size: int
    token_bytes: int  # KV of one token over all layers
    num_layers: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, tail included."""
        return -(-self.num_tokens // self.block_size)

    @property
    def reusable_blocks(self) -> int:
        """Leading blocks that may come from a cache: the last token is always computed."""
        return (self.num_tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker that may be chosen, with the router's bookings already counted in."""

    worker_id: str
    role: str  # prefill | decode | mixed
    cached_blocks: int = 0  # leading blocks of this prompt that it holds
    queued_tokens: int = 0  # prompt tokens to compute before this request
    prefill_tokens_per_s: float = 1000.0
    active_sequences: int = 0
    step_ms: float = 10.0  # of a decode step
    free_blocks: int = 0  # free or evictable now; negative when overbooked
    num_blocks: int = 0
    transport: str = ""  # KV is loaded only from a worker with the same one


@dataclass(frozen=True, slots=True)
class Terms:
    """Milliseconds of each term."""

    queue_ms: float
    compute_ms: float
    transfer_ms: float
    admission_ms: float
    pressure_ms: float
    load_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        computed_ms = self.queue_ms + self.load_ms + self.compute_ms
        return computed_ms + self.transfer_ms + self.admission_ms + self.pressure_ms


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair, or one mixed worker (``decode_id`` is ""); ``holder_id``: who writes KV to the prefill worker first."""

    prefill_id: str
    decode_id: str
    terms: Terms
    holder_id: str = ""
    held_blocks: int = 0  # leading ones that the holder has


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice and why: what else there was, cheapest first, and what each term came to."""

    policy: str
    choice: Candidate
    candidates: tuple[Candidate, ...]
    considered: int  # candidates there were before the list was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How fast KV moves between workers, bytes per second."""

    default_bytes_per_s: float = 1e9
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    pull_setup_ms: float | None = None  # of loading KV from another worker; None: it is never loaded

    def bandwidth(self, writer_id: str, reader_id: str) -> float:
        return max(self.measured.get((writer_id, reader_id), self.default_bytes_per_s), 1.0)


def choose(policy: str, prompt: Prompt, workers: Sequence[Worker], fabric: Fabric, turn: int = 0) -> Decision | None:
    """The best candidate under ``policy`` (cost, round-robin or least-loaded); None where none can hold the prompt.

    Args:
        workers: compatible and ready ones, in any order.
        turn: how many choices were made before; only round-robin looks at it.

    Raises:
        ValueError: an unknown policy.
    """
    pairs = _feasible(prompt, workers)
    if not pairs:
        return None
    halves = {w.worker_id: _Half.of(prompt, w) for w in {w.worker_id: w for pair in pairs for w in pair}.values()}
    pulls = _Pulls.of(prompt, halves, workers, fabric)
    keys = [
        min(_key(side, halves[d.worker_id], fabric) for side in pulls.options(halves[p.worker_id], d.worker_id))
        for p, d in pairs
    ]
    if policy == "cost":
        chosen = min(keys)
    elif policy == "round-robin":
        chosen = _in_turn(sorted(keys, key=lambda k: k[1:3]), turn)
    elif policy == "least-loaded":
        load = {w.worker_id: (w.queued_tokens, w.active_sequences) for w in workers}
        chosen = min(keys, key=lambda k: _load_key(k, load))
    else:
        raise ValueError(f"router.policy must be cost, round-robin or least-loaded, got {policy!r}")
    shown = heapq.nsmallest(SHOWN_CANDIDATES, keys)
    return Decision(
        policy=policy,
        choice=_candidate(chosen, halves, pulls, fabric),
        candidates=tuple(_candidate(key, halves, pulls, fabric) for key in shown),
        considered=len(pairs),
    )


def capacity(workers: Sequence[Worker]) -> int:
    """Most blocks that a prompt may have here: the best over all pairs of the smaller side, and over mixed workers."""
    best = {role: max((w.num_blocks for w in workers if w.role == role), default=0) for role in ("prefill", "decode")}
    mixed = max((w.num_blocks for w in workers if w.role == "mixed"), default=0)
    return max(min(best["prefill"], best["decode"]), mixed)


def uncached_tokens(prompt: Prompt, cached_blocks: int) -> int:
    """Prompt tokens to compute on a worker that holds the first ``cached_blocks`` blocks."""
    return prompt.num_tokens - min(cached_blocks, prompt.reusable_blocks) * prompt.block_size


def _feasible(prompt: Prompt, workers: Sequence[Worker]) -> list[tuple[Worker, Worker]]:
    """Pairs, and mixed workers as pairs with themselves, whose pools hold the prompt at all; in order of ids."""
    fitting = sorted((w for w in workers if w.num_blocks >= prompt.num_blocks), key=lambda w: w.worker_id)
    readers = [w for w in fitting if w.role == "decode"]
    pairs = []
    for worker in fitting:
        if worker.role == "mixed":
            pairs.append((worker, worker))
        elif worker.role == "prefill":
            pairs += [(worker, reader) for reader in readers]
    return pairs


@dataclass(frozen=True, slots=True)
class _Half:
    """What one worker adds to a pair, worked out once however many pairs it is in."""

    worker: Worker
    queue_ms: float  # as the prefill side
    compute_ms: float
    hidden_ms: float  # of the computing, that a transfer may take without being seen
    missing_bytes: int  # as the decode side
    admission_ms: float
    pressure_ms: float
    load_ms: float = 0.0
    holder_id: str = ""
    held_blocks: int = 0

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @classmethod
    def of(cls, prompt: Prompt, w: Worker) -> _Half:
        uncached = uncached_tokens(prompt, w.cached_blocks)
        compute_ms = 1000 * uncached / w.prefill_tokens_per_s
        return cls(
            worker=w,
            queue_ms=1000 * w.queued_tokens / w.prefill_tokens_per_s,
            compute_ms=compute_ms,
            hidden_ms=compute_ms * (1 - 1 / prompt.num_layers),
            missing_bytes=uncached * prompt.token_bytes,
            admission_ms=_admission_ms(prompt, w),
            pressure_ms=w.active_sequences * w.step_ms * PRESSURE_STEPS,
        )

    def pulled(self, prompt: Prompt, holder: Worker, fabric: Fabric) -> _Half | None:
        """The same worker with what the holder has; None where that is slower than computing it."""
        assert fabric.pull_setup_ms is not None
        uncached = uncached_tokens(prompt, holder.cached_blocks)
        loaded_bytes = (uncached_tokens(prompt, self.worker.cached_blocks) - uncached) * prompt.token_bytes
        bandwidth = fabric.bandwidth(holder.worker_id, self.worker_id)
        load_ms = fabric.pull_setup_ms + 1000 * loaded_bytes / bandwidth
        compute_ms = 1000 * uncached / self.worker.prefill_tokens_per_s
        if loaded_bytes <= 0 or load_ms + compute_ms >= self.compute_ms:
            return None
        return replace(
            self,
            load_ms=load_ms,
            compute_ms=compute_ms,
            hidden_ms=compute_ms * (1 - 1 / prompt.num_layers),
            holder_id=holder.worker_id,
            held_blocks=min(holder.cached_blocks, prompt.reusable_blocks),
        )


@dataclass(frozen=True, slots=True)
class _Pulls:
    """What prefill workers may load instead of computing it."""

    sides: Mapping[tuple[str, str], _Half]  # by prefill worker and holder, where that is faster
    best: Mapping[str, tuple[_Half, ...]]  # of those the ones that no other beats in both loading and computing

    @classmethod
    def of(cls, prompt: Prompt, halves: Mapping[str, _Half], workers: Sequence[Worker], fabric: Fabric) -> _Pulls:
        sides: dict[tuple[str, str], _Half] = {}
        best: dict[str, tuple[_Half, ...]] = {}
        deepest = min(max((w.cached_blocks for w in workers), default=0), prompt.reusable_blocks)
        for half in halves.values():
            p = half.worker
            if fabric.pull_setup_ms is None or p.role != "prefill" or p.cached_blocks >= deepest:
                continue
            holders = [w for w in workers if w is not p and w.transport == p.transport]
            mine = [side for w in holders if (side := half.pulled(prompt, w, fabric)) is not None]
            sides |= {(p.worker_id, side.holder_id): side for side in mine}
            best[p.worker_id] = tuple(_unbeaten(mine))
        return cls(sides, best)

    def options(self, p: _Half, decode_id: str) -> Iterator[_Half]:
        """The prefill side without a pull, from the decode worker itself, and from the best others."""
        yield p
        if (own := self.sides.get((p.worker_id, decode_id))) is not None:
            yield own
        yield from self.best.get(p.worker_id, ())


def _unbeaten(sides: Sequence[_Half]) -> Iterator[_Half]:
    least_ms = float("inf")
    for side in sorted(sides, key=lambda s: (s.compute_ms, s.load_ms, s.holder_id)):
        if side.load_ms < least_ms:
            least_ms = side.load_ms
            yield side


def _transfer_ms(p: _Half, d: _Half, fabric: Fabric) -> float:
    if p.worker_id == d.worker_id:
        return 0.0
    return max(0.0, 1000 * d.missing_bytes / fabric.bandwidth(p.worker_id, d.worker_id) - p.hidden_ms)


def _key(p: _Half, d: _Half, fabric: Fabric) -> _Key:
    """Runs for every pair; the sum has the order of `Terms.cost_ms`, so that both are the same number."""
    computed_ms = p.queue_ms + p.load_ms + p.compute_ms
    cost_ms = computed_ms + _transfer_ms(p, d, fabric) + d.admission_ms + d.pressure_ms
    rank = 0 if not p.holder_id else 1 if p.holder_id == d.worker_id else 2
    return cost_ms, p.worker_id, "" if p.worker_id == d.worker_id else d.worker_id, rank, p.holder_id


def _candidate(key: _Key, halves: Mapping[str, _Half], pulls: _Pulls, fabric: Fabric) -> Candidate:
    _, prefill_id, decode_id, _, holder_id = key
    p = pulls.sides[prefill_id, holder_id] if holder_id else halves[prefill_id]
    d = halves[decode_id or prefill_id]
    terms = Terms(p.queue_ms, p.compute_ms, _transfer_ms(p, d, fabric), d.admission_ms, d.pressure_ms, p.load_ms)
    return Candidate(prefill_id, decode_id, terms, holder_id, p.held_blocks)


def _admission_ms(prompt: Prompt, d: Worker) -> float:
    """Predicted wait for blocks: the active sequences give one back for about each block of tokens they make."""
    short_blocks = max(0, prompt.num_blocks - d.free_blocks)
    return short_blocks * prompt.block_size * d.step_ms / max(d.active_sequences, 1)


def _in_turn(keys: Sequence[_Key], turn: int) -> _Key:
    """Prefill (and mixed) workers take turns; each goes through its decode workers one further every round."""
    firsts = sorted({key[1] for key in keys})
    mine = [key for key in keys if key[1] == firsts[turn % len(firsts)]]
    return mine[(turn // len(firsts)) % len(mine)]


def _load_key(key: _Key, load: Mapping[str, tuple[int, int]]) -> tuple[int, int, str, str]:
    """Least prefill queue, then fewest active sequences where it decodes."""
    _, prefill_id, decode_id, *_ = key
    return load[prefill_id][0], load[decode_id or prefill_id][1], prefill_id, decode_id
