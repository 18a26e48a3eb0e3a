"""What every pair costs, in milliseconds to first token: the terms of `policy.choose`, found without trying all pairs.

    cost(P, D) = computed(side) + seen(side, D) + decode(D) + after(side)      a side: P with or without a load

A pair adds only the transfer to what its two halves cost. So with both halves in order of what they cost at least, the
search ends where even a hidden transfer, after a load over the fastest way, would be too dear: of 32 × 32 pairs it
looks at some tens. What a prefill worker may load is worked out when the search comes to it, if it does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.router.loads import LoadCost
from services.router.policy_types import Candidate, Fabric, Prompt, Terms, Worker, uncached_tokens

PRESSURE_STEPS = 1 / 16
"""Price of one active sequence on the decode worker, in its decode steps."""
DELAY = 0.5
"""Price of a millisecond of computing for each prompt that waits or runs on a prefill worker, on average."""
COPY = 1.0
"""Price of a millisecond of computing whose KV another worker has already: here it takes the place of other KV, which
is then computed again, if it is asked for."""
ROUNDING = 1e-9
"""More than sums of the same numbers in another order differ by, relatively."""
NOT_LOADED, FROM_READER, FROM_OTHER = range(3)
"""In this order where the cost is equal."""
Key = tuple[float, str, str, int, str]
"""Cost, prefill worker, decode worker or "", one of the three above, holder or ""."""


@dataclass(slots=True)
class Side:
    """One way to have a prompt's KV complete on a prefill or mixed worker."""

    blocks: int  # leading ones that need not be computed
    load_ms: float
    compute_ms: float
    computed_ms: float  # until its KV is complete: queue, load, computing
    hidden_ms: float  # of the computing, that a transfer may take without being seen
    delay_ms: float
    after_ms: float  # what it costs others: delay and copy


Way = tuple[str, Side]
"""A holder, or "", and what it comes to."""


@dataclass(slots=True)
class First:
    """A prefill or mixed worker."""

    worker: Worker
    queue_ms: float
    copy_ms: float
    alone: Side  # nothing loaded
    floor_ms: float  # queue, load, computing and what it costs others: no way is cheaper
    ways: tuple[Way, ...] = ()  # that no other beats, whatever the transfer takes; empty: not worked out yet
    by_holder: Mapping[str, Side] = field(default_factory=dict)  # all that are faster than computing


@dataclass(slots=True)
class Second:
    """A decode or mixed worker."""

    worker: Worker
    scaled_bytes: int  # that it lacks, times 1000
    admission_ms: float
    pressure_ms: float
    decode_ms: float


class Costs:
    """Of one prompt on workers that could hold it. ``holders``: all that may have KV of it, too small ones included."""

    def __init__(self, prompt: Prompt, fitting: Sequence[Worker], holders: Sequence[Worker], fabric: Fabric) -> None:
        self._prompt, self._fabric = prompt, fabric
        lines = [w.active_sequences for w in fitting if w.role == "prefill"]
        has_pairs = lines and any(w.role == "decode" for w in fitting)
        self._crowd = sum(lines) / len(lines) if has_pairs else 0.0
        self._holders: list[
            tuple[int, str, str]
        ] = []  # less than 0 by as many blocks, id, transport: the deepest first
        if fabric.pull_setup_ms is not None:
            most = prompt.reusable_blocks
            held = [(-min(w.cached_blocks, most), w.worker_id, w.transport) for w in holders if w.cached_blocks > 0]
            self._holders = sorted(held)
        self._deepest = max((w.cached_blocks for w in fitting if w.role != "decode"), default=0)
        self._firsts = {w.worker_id: self._first(w) for w in fitting if w.role != "decode"}
        self._seconds = {w.worker_id: self._second(w) for w in fitting if w.role != "prefill"}

    def cheapest(self, count: int) -> list[Key]:
        """Keys of so many pairs and mixed workers, each used in its cheapest way; the cheapest first."""
        mixed = [name for name, p in self._firsts.items() if p.worker.role == "mixed"]
        found = sorted(self.key(name, "") for name in mixed)[:count]
        seconds = [
            (d.decode_ms, name, d.scaled_bytes) for name, d in self._seconds.items() if d.worker.role == "decode"
        ]
        if seconds:
            seconds.sort()
            least_ms = seconds[0][0]
            firsts = [(p.floor_ms + least_ms, name) for name, p in self._firsts.items()]
            for floor_ms, name in sorted(firsts):
                if len(found) == count and floor_ms > found[-1][0]:
                    break
                if self._firsts[name].worker.role == "prefill":
                    self._search(name, seconds, found, count)
        return found

    def key(self, first_id: str, second_id: str) -> Key:
        """The cheapest way to use a pair, or a mixed worker (``second_id`` is ""); keys are in total order."""
        p, d = self._firsts[first_id], self._seconds[second_id or first_id]
        return min(self._keys(p, d, second_id))

    def candidate(self, key: Key) -> Candidate:
        """What a key stands for, with its terms."""
        _, first_id, second_id, _, holder_id = key
        p, d = self._firsts[first_id], self._seconds[second_id or first_id]
        side = p.by_holder[holder_id] if holder_id else p.alone
        transfer_ms = max(0.0, self._wire_ms(first_id, second_id) - side.hidden_ms)
        terms = Terms(
            queue_ms=p.queue_ms,
            compute_ms=side.compute_ms,
            transfer_ms=transfer_ms,
            admission_ms=d.admission_ms,
            pressure_ms=d.pressure_ms,
            load_ms=side.load_ms,
            delay_ms=side.delay_ms,
            copy_ms=p.copy_ms,
        )
        return Candidate(first_id, second_id, terms, holder_id, side.blocks if holder_id else 0)

    # --- the search ---

    def _search(self, first_id: str, seconds: Sequence[tuple[float, str, int]], found: list[Key], count: int) -> None:
        """Put the pairs of one prefill worker where they belong among those found."""
        p, measured, default = self._firsts[first_id], self._fabric.measured, self._fabric.default_bytes_per_s
        ways = [(s.computed_ms, s.hidden_ms, s.after_ms, holder_id) for holder_id, s in self._ways(p)]
        hidden = [way[1] for way in ways]
        by_holder = p.by_holder
        least_ms, least_after_ms = min(way[0] for way in ways), min(way[2] for way in ways)
        worst_ms = found[-1][0] if len(found) == count else float("inf")
        for decode_ms, second_id, scaled_bytes in seconds:
            if least_ms + decode_ms + least_after_ms > worst_ms:
                break
            rate = measured.get((first_id, second_id), default)
            wire_ms = scaled_bytes / (rate if rate > 1.0 else 1.0)
            options = ways
            if len(ways) > 1:  # the first that hides the transfer, and the one before it, which nearly does
                at = bisect_left(hidden, wire_ms)
                options = ways[max(0, at - 1) : at + 1]
            if second_id in by_holder:
                own = by_holder[second_id]
                options = [*options, (own.computed_ms, own.hidden_ms, own.after_ms, second_id)]
            best: Key | None = None
            for computed_ms, hidden_ms, after_ms, holder_id in options:
                seen_ms = wire_ms - hidden_ms
                cost_ms = (computed_ms + seen_ms if seen_ms > 0 else computed_ms) + decode_ms + after_ms
                if cost_ms <= worst_ms:
                    key = (cost_ms, first_id, second_id, _rank(holder_id, second_id), holder_id)
                    best = key if best is None or key < best else best
            if best is not None:
                insort(found, best)
                del found[count:]
                worst_ms = found[-1][0] if len(found) == count else worst_ms

    def _keys(self, p: First, d: Second, second_id: str) -> Iterator[Key]:
        """Of all ways to use a pair; the sum has the order of `Terms.cost_ms`, so that both are the same number."""
        first_id = p.worker.worker_id
        wire_ms = self._wire_ms(first_id, second_id)
        ways = self._ways(p)
        own = [(second_id, p.by_holder[second_id])] if second_id in p.by_holder else []
        for holder_id, side in (*ways, *own):
            cost_ms = side.computed_ms + max(0.0, wire_ms - side.hidden_ms) + d.decode_ms + side.after_ms
            yield cost_ms, first_id, second_id, _rank(holder_id, second_id), holder_id

    def _wire_ms(self, first_id: str, second_id: str) -> float:
        if not second_id:
            return 0.0
        return self._seconds[second_id].scaled_bytes / self._fabric.bandwidth(first_id, second_id)

    # --- halves ---

    def _first(self, w: Worker) -> First:
        queue_ms, copy_ms = 1000 * w.queued_tokens / w.prefill_tokens_per_s, self._copy_ms(w)
        alone = self._side(w, queue_ms, copy_ms, w.cached_blocks)
        floor_ms = alone.computed_ms + alone.after_ms
        deepest = -self._holders[0][0] if self._holders else 0
        if w.role == "prefill" and deepest > w.cached_blocks:  # a load costs as much as its bytes at the highest speed
            scaled_bytes = 1000 * (deepest - w.cached_blocks) * self._prompt.block_size * self._prompt.token_bytes
            best = self._side(w, queue_ms, copy_ms, deepest, scaled_bytes / self._fabric.fastest_bytes_per_s)
            floor_ms = min(floor_ms, best.computed_ms + best.after_ms)
        return First(w, queue_ms, copy_ms, alone, floor_ms * (1 - ROUNDING))

    def _copy_ms(self, w: Worker) -> float:
        """Loaded or computed here: it takes as much room."""
        lacking = uncached_tokens(self._prompt, w.cached_blocks) - uncached_tokens(self._prompt, self._deepest)
        compute_ms = 1000 * lacking / w.prefill_tokens_per_s
        return COPY * w.full_share * compute_ms * (1 + DELAY * self._crowd)

    def _side(self, w: Worker, queue_ms: float, copy_ms: float, blocks: int, load_ms: float = 0.0) -> Side:
        """``blocks``: that need not be computed."""
        compute_ms = 1000 * uncached_tokens(self._prompt, blocks) / w.prefill_tokens_per_s
        computed_ms = queue_ms + load_ms + compute_ms
        hidden_ms = compute_ms * (1 - 1 / self._prompt.num_layers)
        delay_ms = DELAY * self._crowd * compute_ms
        return Side(blocks, load_ms, compute_ms, computed_ms, hidden_ms, delay_ms, delay_ms + copy_ms)

    def _second(self, w: Worker) -> Second:
        prompt = self._prompt
        missing_bytes = uncached_tokens(prompt, w.cached_blocks) * prompt.token_bytes
        short_blocks = max(0, prompt.num_blocks - w.free_blocks)
        # Active sequences give a block back for about each block of tokens they make.
        admission_ms = short_blocks * prompt.block_size * w.step_ms / max(w.active_sequences, 1)
        pressure_ms = w.active_sequences * w.step_ms * PRESSURE_STEPS
        return Second(w, 1000 * missing_bytes, admission_ms, pressure_ms, admission_ms + pressure_ms)

    # --- what may be loaded ---

    def _ways(self, p: First) -> tuple[Way, ...]:
        if not p.ways:
            p.by_holder = self._loaded(p) if p.worker.role == "prefill" else {}
            p.ways = tuple(_unbeaten([("", p.alone), *p.by_holder.items()]))
        return p.ways

    def _loaded(self, p: First) -> dict[str, Side]:
        """By holder, what is faster than computing it. Over ways at the assumed cost the deepest is enough where more
        blocks are cheaper whatever is seen of the transfer."""
        w, prompt, fabric = p.worker, self._prompt, self._fabric
        loads, measured = fabric.loads, fabric.measured
        own_blocks = min(w.cached_blocks, prompt.reusable_blocks)
        assumed = LoadCost(setup_ms=fabric.pull_setup_ms or 0.0, bytes_per_s=max(fabric.default_bytes_per_s, 1.0))
        token_ms = 1000 / w.prefill_tokens_per_s * (1 / prompt.num_layers + DELAY * self._crowd)  # as far as it shows
        is_deepest_enough = 1000 * prompt.token_bytes / assumed.bytes_per_s < token_ms * (1 - ROUNDING)
        is_all_assumed = not loads and not measured
        found: dict[str, Side] = {}
        last_blocks, last = 0, p.alone
        for negative, holder_id, transport in self._holders:
            blocks, way = -negative, (holder_id, w.worker_id)
            if blocks <= own_blocks:
                break
            if transport != w.transport:
                continue
            is_assumed = is_all_assumed or (way not in loads and way not in measured)
            if is_assumed and blocks < last_blocks and is_deepest_enough:
                continue
            if is_assumed and blocks == last_blocks:
                side = last
            else:
                cost = assumed if is_assumed else fabric.load_cost(*way)
                num_bytes = (blocks - own_blocks) * prompt.block_size * prompt.token_bytes
                load_ms = cost.ms(num_bytes, prompt.num_layers)  # fresh blocks are neighbours: a range a layer
                side = self._side(w, p.queue_ms, p.copy_ms, blocks, load_ms)
                if is_assumed:
                    last_blocks, last = blocks, side
            if side.load_ms + side.compute_ms < p.alone.compute_ms:
                found[holder_id] = side
        return found


def _unbeaten(ways: Iterable[Way]) -> Iterator[Way]:
    """Those that are cheapest for some transfer: hidden by the computing, or seen but for what hides."""
    least_ms = float("inf")
    for _, seen_ms, holder_id, side in sorted(
        (s.computed_ms + s.after_ms, s.computed_ms - s.hidden_ms + s.after_ms, holder_id, s) for holder_id, s in ways
    ):
        if seen_ms < least_ms:
            least_ms = seen_ms
            yield holder_id, side


def _rank(holder_id: str, second_id: str) -> int:
    return NOT_LOADED if not holder_id else FROM_READER if holder_id == second_id else FROM_OTHER
