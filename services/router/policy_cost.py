"""What every pair costs, in milliseconds to first token: the terms of `policy.choose`, worked out once for each worker.

A pair adds only the transfer to what its two halves cost, so 32 × 32 workers are 64 halves and 1024 short sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.router.loads import Need, Offer, load_or_compute
from services.router.policy_types import Candidate, Fabric, Pair, Prompt, Terms, Worker, uncached_tokens

PRESSURE_STEPS = 1 / 16
"""Price of one active sequence on the decode worker, in its decode steps."""
DELAY = 0.5
"""Price of a millisecond of computing for each prompt that waits or runs on a prefill worker, on average."""
Key = tuple[float, str, str, int, str]  # cost, prefill worker, decode worker or "", rank of the holder, holder or ""


@dataclass(frozen=True, slots=True)
class Half:
    """What one worker adds to a pair, worked out once however many pairs it is in."""

    worker: Worker
    queue_ms: float  # as the prefill side
    compute_ms: float
    computed_ms: float  # until its KV is complete: queue, load, computing
    delay_ms: float  # what computing it costs others
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

    @property
    def decode_ms(self) -> float:
        return self.admission_ms + self.pressure_ms

    @classmethod
    def of(cls, prompt: Prompt, w: Worker, crowd: float) -> Half:
        """Of a worker by itself, without anything loaded to it. ``crowd``: prompts on a prefill worker, on average."""
        uncached = uncached_tokens(prompt, w.cached_blocks)
        compute_ms = 1000 * uncached / w.prefill_tokens_per_s
        queue_ms = 1000 * w.queued_tokens / w.prefill_tokens_per_s
        return cls(
            worker=w,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
            computed_ms=queue_ms + 0.0 + compute_ms,
            delay_ms=DELAY * crowd * compute_ms,
            hidden_ms=compute_ms * (1 - 1 / prompt.num_layers),
            missing_bytes=uncached * prompt.token_bytes,
            admission_ms=_admission_ms(prompt, w),
            pressure_ms=w.active_sequences * w.step_ms * PRESSURE_STEPS,
        )

    def need(self, prompt: Prompt) -> Need:
        """The prompt, as loads to this worker are reckoned."""
        return Need(
            num_tokens=prompt.num_tokens,
            block_size=prompt.block_size,
            token_bytes=prompt.token_bytes,
            num_layers=prompt.num_layers,
            own_blocks=self.worker.cached_blocks,
            tokens_per_s=self.worker.prefill_tokens_per_s,
        )

    def pulled(self, need: Need, offer: Offer, crowd: float) -> Half | None:
        """The same worker with what is offered; None where that is slower than computing it."""
        found = load_or_compute(need, (offer,))
        if found.offer is None:
            return None
        return replace(
            self,
            load_ms=found.load_ms,
            compute_ms=found.compute_ms,
            computed_ms=self.queue_ms + found.load_ms + found.compute_ms,
            delay_ms=DELAY * crowd * found.compute_ms,
            hidden_ms=found.compute_ms * (1 - 1 / need.num_layers),
            holder_id=offer.source,
            held_blocks=offer.blocks,
        )


@dataclass(frozen=True, slots=True)
class _Pulls:
    """What prefill workers may load instead of computing it."""

    sides: Mapping[tuple[str, str], Half]  # by prefill worker and holder, where that is faster
    best: Mapping[str, tuple[Half, ...]]  # of those the ones that no other beats in both loading and computing

    @classmethod
    def of(
        cls, prompt: Prompt, halves: Mapping[str, Half], workers: Sequence[Worker], fabric: Fabric, crowd: float
    ) -> _Pulls:
        sides: dict[tuple[str, str], Half] = {}
        best: dict[str, tuple[Half, ...]] = {}
        deepest = min(max((w.cached_blocks for w in workers), default=0), prompt.reusable_blocks)
        for half in halves.values():
            p = half.worker
            if fabric.pull_setup_ms is None or p.role != "prefill" or p.cached_blocks >= deepest:
                continue
            need = half.need(prompt)
            offers = [
                Offer(
                    source=w.worker_id,
                    blocks=min(w.cached_blocks, prompt.reusable_blocks),
                    cost=fabric.load_cost(w.worker_id, p.worker_id),
                )
                for w in workers
                if w.cached_blocks > p.cached_blocks and w.transport == p.transport
            ]
            mine = [side for offer in offers if (side := half.pulled(need, offer, crowd)) is not None]
            sides |= {(p.worker_id, side.holder_id): side for side in mine}
            best[p.worker_id] = tuple(_unbeaten(mine))
        return cls(sides, best)

    def options(self, p: Half, decode_id: str) -> Iterator[Half]:
        """The prefill side without a pull, from the decode worker itself, and from the best others."""
        yield p
        if (own := self.sides.get((p.worker_id, decode_id))) is not None:
            yield own
        yield from self.best.get(p.worker_id, ())


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one prompt on these workers."""

    halves: Mapping[str, Half]
    pulls: _Pulls
    fabric: Fabric

    @classmethod
    def of(cls, prompt: Prompt, pairs: Sequence[Pair], workers: Sequence[Worker], fabric: Fabric) -> Costs:
        sides = {w.worker_id: w for pair in pairs for w in pair}
        lines = [w.active_sequences for w in sides.values() if w.role == "prefill"]
        crowd = sum(lines) / len(lines) if lines else 0.0
        halves = {name: Half.of(prompt, w, crowd) for name, w in sides.items()}
        return cls(halves, _Pulls.of(prompt, halves, workers, fabric, crowd), fabric)

    def all_ms(self, pairs: Sequence[Pair]) -> list[float]:
        """What each pair costs, used in the cheapest way. It runs for every pair, so it calls nothing twice for one."""
        measured, default = self.fabric.measured, self.fabric.default_bytes_per_s
        seconds = {name: (1000 * d.missing_bytes, d.decode_ms) for name, d in self.halves.items()}
        own = self.pulls.sides
        found: list[float] = []
        last, p = "", next(iter(self.halves.values()))
        sides: tuple[Half, ...] = ()
        computed_ms = hidden_ms = delay_ms = 0.0
        for first, second in pairs:
            first_id, second_id = first.worker_id, second.worker_id
            if first_id != last:
                last, p, sides = first_id, self.halves[first_id], self.pulls.best.get(first_id, ())
                computed_ms, hidden_ms, delay_ms = p.computed_ms, p.hidden_ms, p.delay_ms
            scaled_bytes, decode_ms = seconds[second_id]
            rate = measured.get((first_id, second_id), default)
            wire_ms = 0.0 if first is second else scaled_bytes / (rate if rate > 1.0 else 1.0)
            seen_ms = wire_ms - hidden_ms
            cost_ms = computed_ms + (seen_ms if seen_ms > 0 else 0.0) + decode_ms + delay_ms
            if sides:
                for side in (*sides, own.get((first_id, second_id), p)):
                    side_ms = side.computed_ms + max(0.0, wire_ms - side.hidden_ms) + decode_ms + side.delay_ms
                    if side_ms < cost_ms:
                        cost_ms = side_ms
            found.append(cost_ms)
        return found

    def key(self, pair: Pair) -> Key:
        """The cheapest way to use this pair; keys are in total order."""
        p, d = self.halves[pair[0].worker_id], self.halves[pair[1].worker_id]
        return min(_key(side, d, self.fabric) for side in self.pulls.options(p, d.worker_id))

    def candidate(self, key: Key) -> Candidate:
        """What a key stands for, with its terms."""
        _, prefill_id, decode_id, _, holder_id = key
        p = self.pulls.sides[prefill_id, holder_id] if holder_id else self.halves[prefill_id]
        d = self.halves[decode_id or prefill_id]
        transfer_ms = _transfer_ms(p, d, self.fabric)
        terms = Terms(p.queue_ms, p.compute_ms, transfer_ms, d.admission_ms, d.pressure_ms, p.load_ms, p.delay_ms)
        return Candidate(prefill_id, decode_id, terms, holder_id, p.held_blocks)


def _unbeaten(sides: Sequence[Half]) -> Iterator[Half]:
    least_ms = float("inf")
    for side in sorted(sides, key=lambda s: (s.compute_ms, s.load_ms, s.holder_id)):
        if side.load_ms < least_ms:
            least_ms = side.load_ms
            yield side


def _transfer_ms(p: Half, d: Half, fabric: Fabric) -> float:
    if p.worker_id == d.worker_id:
        return 0.0
    return max(0.0, 1000 * d.missing_bytes / fabric.bandwidth(p.worker_id, d.worker_id) - p.hidden_ms)


def _key(p: Half, d: Half, fabric: Fabric) -> Key:
    """Runs for every pair; the sum has the order of `Terms.cost_ms`, so that both are the same number."""
    cost_ms = p.computed_ms + _transfer_ms(p, d, fabric) + d.decode_ms + p.delay_ms
    rank = 0 if not p.holder_id else 1 if p.holder_id == d.worker_id else 2
    return cost_ms, p.worker_id, "" if p.worker_id == d.worker_id else d.worker_id, rank, p.holder_id


def _admission_ms(prompt: Prompt, d: Worker) -> float:
    """Predicted wait for blocks: the active sequences give one back for about each block of tokens they make."""
    short_blocks = max(0, prompt.num_blocks - d.free_blocks)
    return short_blocks * prompt.block_size * d.step_ms / max(d.active_sequences, 1)
