"""Which workers serve a request: a pure function from what is known to an explained decision.

    cost(P, D) = queue(P) + uncached_tokens / prefill_rate(P)
               + max(0, missing_bytes(D) / bandwidth(P→D) − overlap) + admission(D) + pressure(D)
    cost(M)    = queue(M) + uncached_tokens / prefill_rate(M) + admission(M) + pressure(M)     for a mixed worker

All in ms to first token. The least cost wins; ties go to the lower worker ids, prefill first. `pressure` is no time of
this request: it prices what a sequence more costs those that already decode there, in the same unit. Layers move while
later ones are computed, so all but the last layer's share of the computing hides the transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PRESSURE_STEPS = 1 / 16
"""Price of one active sequence on the decode worker, in its decode steps."""
_Key = tuple[float, str, str]  # cost, prefill worker id, decode worker id or ""
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


@dataclass(frozen=True, slots=True)
class Terms:
    """Milliseconds of each term."""

    queue_ms: float
    compute_ms: float
    transfer_ms: float
    admission_ms: float
    pressure_ms: float

    @property
    def cost_ms(self) -> float:
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.admission_ms + self.pressure_ms


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair, or one mixed worker (``decode_id`` is "")."""

    prefill_id: str
    decode_id: str
    terms: Terms


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

    def bandwidth(self, prefill_id: str, decode_id: str) -> float:
        return max(self.measured.get((prefill_id, decode_id), self.default_bytes_per_s), 1.0)


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
    keys = [_key(halves[p.worker_id], halves[d.worker_id], fabric) for p, d in pairs]
    if policy == "cost":
        chosen = min(keys)
    elif policy == "round-robin":
        chosen = _in_turn(sorted(keys, key=lambda k: k[1:]), turn)
    elif policy == "least-loaded":
        load = {w.worker_id: (w.queued_tokens, w.active_sequences) for w in workers}
        chosen = min(keys, key=lambda k: _load_key(k, load))
    else:
        raise ValueError(f"router.policy must be cost, round-robin or least-loaded, got {policy!r}")
    shown = heapq.nsmallest(SHOWN_CANDIDATES, keys)
    return Decision(
        policy=policy,
        choice=_candidate(chosen, halves, fabric),
        candidates=tuple(_candidate(key, halves, fabric) for key in shown),
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

    worker_id: str
    queue_ms: float  # as the prefill side
    compute_ms: float
    hidden_ms: float  # of the computing, that a transfer may take without being seen
    missing_bytes: int  # as the decode side
    admission_ms: float
    pressure_ms: float

    @classmethod
    def of(cls, prompt: Prompt, w: Worker) -> _Half:
        uncached = uncached_tokens(prompt, w.cached_blocks)
        compute_ms = 1000 * uncached / w.prefill_tokens_per_s
        return cls(
            worker_id=w.worker_id,
            queue_ms=1000 * w.queued_tokens / w.prefill_tokens_per_s,
            compute_ms=compute_ms,
            hidden_ms=compute_ms * (1 - 1 / prompt.num_layers),
            missing_bytes=uncached * prompt.token_bytes,
            admission_ms=_admission_ms(prompt, w),
            pressure_ms=w.active_sequences * w.step_ms * PRESSURE_STEPS,
        )


def _transfer_ms(p: _Half, d: _Half, fabric: Fabric) -> float:
    if p is d:
        return 0.0
    return max(0.0, 1000 * d.missing_bytes / fabric.bandwidth(p.worker_id, d.worker_id) - p.hidden_ms)


def _key(p: _Half, d: _Half, fabric: Fabric) -> _Key:
    """Runs for every pair; the sum has the order of `Terms.cost_ms`, so that both are the same number."""
    cost_ms = p.queue_ms + p.compute_ms + _transfer_ms(p, d, fabric) + d.admission_ms + d.pressure_ms
    return cost_ms, p.worker_id, "" if p is d else d.worker_id


def _candidate(key: _Key, halves: Mapping[str, _Half], fabric: Fabric) -> Candidate:
    _, prefill_id, decode_id = key
    p, d = halves[prefill_id], halves[decode_id or prefill_id]
    terms = Terms(p.queue_ms, p.compute_ms, _transfer_ms(p, d, fabric), d.admission_ms, d.pressure_ms)
    return Candidate(prefill_id, decode_id, terms)


def _admission_ms(prompt: Prompt, d: Worker) -> float:
    """Predicted wait for blocks: the active sequences give one back for about each block of tokens they make."""
    short_blocks = max(0, prompt.num_blocks - d.free_blocks)
    return short_blocks * prompt.block_size * d.step_ms / max(d.active_sequences, 1)


def _in_turn(keys: Sequence[_Key], turn: int) -> _Key:
    """Prefill (and mixed) workers take turns; each goes through its decode workers one further every round."""
    firsts = sorted({prefill_id for _, prefill_id, _ in keys})
    mine = [key for key in keys if key[1] == firsts[turn % len(firsts)]]
    return mine[(turn // len(firsts)) % len(mine)]


def _load_key(key: _Key, load: Mapping[str, tuple[int, int]]) -> tuple[int, int, str, str]:
    """Least prefill queue, then fewest active sequences where it decodes."""
    _, prefill_id, decode_id = key
    return load[prefill_id][0], load[decode_id or prefill_id][1], prefill_id, decode_id
