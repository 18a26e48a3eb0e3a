"""Policies for comparison, among them the published formulas of other routers, on the same candidates as `cost`.

Each takes the prompt, every pair that could hold it (in order of ids), the number of choices made before and four
uniform draws, and returns a pair. None reads a clock or draws by itself. Where a formula scores one pool at a time, the
pair is the best of each; a mixed worker is in both pools and scores what it scores in each, together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.router.policy_types import Draws, Pair, Prompt, Worker

Rule = Callable[[Prompt, Sequence[Pair], int, Draws], Pair]

LLMD_PREFIX, LLMD_QUEUE, LLMD_KV = 3.0, 2.0, 2.0
"""Weights of the scorers in the default profile of the Gateway API inference extension."""


def round_robin(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """Prefill (and mixed) workers take turns; each goes through its decode workers one further every round."""
    firsts = _firsts(pairs)
    mine = _pairs_of(firsts[turn % len(firsts)], pairs)
    return mine[(turn // len(firsts)) % len(mine)]


def least_loaded(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """Fewest prompt tokens queued, then fewest active sequences where it decodes; ties go to the lower ids."""
    return min(pairs, key=lambda pair: (pair[0].queued_tokens, pair[1].active_sequences, *_ids(pair)))


def power_of_two(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """Of two prefill workers drawn at random the one with fewer queued tokens, and of two of its decode workers the one
    with fewer active sequences; ties go to the one drawn first.

    Source: M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12 (2001).
    """
    firsts = _firsts(pairs)
    first = min(_two(len(firsts), draws[0], draws[1]), key=lambda i: firsts[i].queued_tokens)
    mine = _pairs_of(firsts[first], pairs)
    return mine[min(_two(len(mine), draws[2], draws[3]), key=lambda i: mine[i][1].active_sequences)]


def prefix_only(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """The most leading blocks cached where it is computed, then where it is decoded, whatever the load; equal ones take
    turns."""

    def depth(pair: Pair) -> tuple[int, int]:
        p, d = (min(w.cached_blocks, prompt.reusable_blocks) for w in pair)
        return p, d

    deepest = max(depth(pair) for pair in pairs)
    equal = [pair for pair in pairs if depth(pair) == deepest]
    return round_robin(prompt, equal, turn, draws)


def dynamo(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """Least logit in each pool, in blocks; ties go to the lower ids.

        prefill: max(0, (queued_tokens + num_tokens) / block_size − cached_blocks) + used_blocks + num_blocks
        decode:  used_blocks + num_blocks

    With the published defaults: credit of an overlap 1 without decay, load scale 1, temperature 0, no weight for active
    requests; in its disaggregated mode the decode router gives no credit and tracks no prompt tokens. ``used_blocks``
    are those that cannot be had now. Blocks that the prompt shares with a running one count twice here.

    Source: ai-dynamo/dynamo, ``DefaultWorkerSelector::worker_logit``.
    """
    size = prompt.block_size

    def compute(w: Worker) -> float:
        overlap = min(w.cached_blocks, prompt.reusable_blocks)
        return max(0.0, (w.queued_tokens + prompt.num_tokens) / size - overlap) + hold(w)

    def hold(w: Worker) -> float:
        return w.num_blocks - w.free_blocks + prompt.num_blocks

    return _least(pairs, compute, hold)


def llm_d(prompt: Prompt, pairs: Sequence[Pair], turn: int, draws: Draws) -> Pair:
    """Highest weighted score in each pool, each scorer in [0, 1]; ties go to the lower ids.

        3 × min(1, cached_blocks / full blocks of the prompt)          precise prefix
        2 × (longest − own) / (longest − shortest), 1 where all equal  queue
        2 × (1 − used_blocks / num_blocks)                             KV utilisation

    The queue is of requests there. Here it is what the view has: prompt tokens on a prefill worker, sequences on a
    decode worker; the scorer takes out the unit.

    Source: llm-d precise prefix scorer; weights and the other scorers from the Gateway API inference extension.
    """
    full = prompt.num_tokens // prompt.block_size

    def common(w: Worker) -> float:
        used = min(max(0.0, 1 - w.free_blocks / w.num_blocks), 1.0)
        return LLMD_PREFIX * (min(1.0, w.cached_blocks / full) if full else 0.0) + LLMD_KV * (1 - used)

    waiting = _shortness({p.worker_id: p.queued_tokens for p, _ in pairs})
    running = _shortness({d.worker_id: d.active_sequences for _, d in pairs})
    return _least(
        pairs,
        lambda p: -(common(p) + LLMD_QUEUE * waiting[p.worker_id]),
        lambda d: -(common(d) + LLMD_QUEUE * running[d.worker_id]),
    )


RIVALS: Mapping[str, Rule] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
    "prefix-only": prefix_only,
    "dynamo": dynamo,
    "llm-d": llm_d,
}
"""By the name that router.policy has for them."""


def _least(pairs: Sequence[Pair], first: Callable[[Worker], float], second: Callable[[Worker], float]) -> Pair:
    """The pair with the least sum of both scores; each worker is scored once."""
    firsts = {w.worker_id: first(w) for w in {p.worker_id: p for p, _ in pairs}.values()}
    seconds = {w.worker_id: second(w) for w in {d.worker_id: d for _, d in pairs}.values()}
    return min(pairs, key=lambda pair: (firsts[pair[0].worker_id] + seconds[pair[1].worker_id], *_ids(pair)))


def _shortness(queues: Mapping[str, int]) -> dict[str, float]:
    """1 for the shortest queue, 0 for the longest, in proportion between them."""
    longest, shortest = max(queues.values()), min(queues.values())
    spread = longest - shortest
    return {name: (longest - q) / spread if spread else 1.0 for name, q in queues.items()}


def _two(count: int, first: float, second: float) -> tuple[int, int]:
    """Two different numbers below ``count``, equally likely; the same twice where there is one."""
    one = int(first * count)
    return one, (one + 1 + int(second * (count - 1))) % count


def _firsts(pairs: Sequence[Pair]) -> list[Worker]:
    return list({p.worker_id: p for p, _ in pairs}.values())


def _pairs_of(first: Worker, pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair[0].worker_id == first.worker_id]


def _ids(pair: Pair) -> tuple[str, str]:
    return pair[0].worker_id, "" if pair[0].worker_id == pair[1].worker_id else pair[1].worker_id
