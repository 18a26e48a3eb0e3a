"""Which workers serve a request: a pure function from what is known to an explained decision.

    cost(P, D) = queue(P) + load(H→P) + uncached_tokens / prefill_rate(P)
               + max(0, missing_bytes(D) / bandwidth(P→D) − overlap) + admission(D) + pressure(D) + delay(P) + copy(P)
    delay(P)   = DELAY × crowd × uncached_tokens / prefill_rate(P)      crowd: prompts on a prefill worker, on average
    copy(P)    = COPY × full share(P) × (1 + DELAY × crowd) × copied_tokens / prefill_rate(P)
    load(H→P)  = set-up + ranges × per range + loaded_bytes / bandwidth(H→P)   where some holder H has more than P
    cost(M)    = queue(M) + uncached_tokens / prefill_rate(M) + admission(M) + pressure(M) + delay(M) + copy(M)
               of a mixed worker

All in ms to first token. The least cost wins; ties go to the lower worker ids, prefill first. KV is loaded where that
is faster than computing it, from the holder with which the pair is cheapest; ties go to D itself. `pressure` is no time
of this request: it prices what a sequence more costs those that already decode there, in the same unit. Nor is `delay`:
a millisecond of computing is a millisecond later for whoever waits behind it, and the more prompts wait, the more there
are. So an idle cluster gives each prompt its first token soonest, and a busy one computes least. `copy` is the price of
KV that another worker that computes prompts has already (copied_tokens) and this one would have, too, whether it loads
or computes it: where the pool is full it takes the place of other KV, which is then computed again. Layers move while
later ones are computed, so all but the last layer's share of the computing hides the transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.router.policy_cost import COPY as COPY
from services.router.policy_cost import DELAY as DELAY
from services.router.policy_cost import PRESSURE_STEPS as PRESSURE_STEPS
from services.router.policy_cost import Costs
from services.router.policy_rivals import RIVALS
from services.router.policy_types import NO_DRAWS, Draws, Pair
from services.router.policy_types import Candidate as Candidate
from services.router.policy_types import Decision as Decision
from services.router.policy_types import Fabric as Fabric
from services.router.policy_types import Prompt as Prompt
from services.router.policy_types import Worker as Worker
from services.router.policy_types import uncached_tokens as uncached_tokens

POLICIES = ("cost", *RIVALS)
"""What router.policy may be."""
SHOWN_CANDIDATES = 16
"""Candidates kept in a decision, cheapest first."""


def choose(
    policy: str,
    prompt: Prompt,
    workers: Sequence[Worker],
    fabric: Fabric,
    turn: int = 0,
    draws: Draws = NO_DRAWS,
) -> Decision | None:
    """The best candidate under ``policy``; None where none can hold the prompt.

    A policy other than `cost` chooses the pair, and no more: KV is loaded to it under all of them where that is faster.

    Args:
        workers: compatible and ready ones, in any order.
        turn: how many choices were made before; round-robin counts by it, and who else has ties to break.
        draws: uniform numbers, for policies that choose by chance.

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"router.policy must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {policy!r}")
    fitting = sorted((w for w in workers if w.num_blocks >= prompt.num_blocks), key=lambda w: w.worker_id)
    roles = Counter(w.role for w in fitting)
    considered = roles["prefill"] * roles["decode"] + roles["mixed"]
    if not considered:
        return None
    costs = Costs(prompt, fitting, workers, fabric)
    shown = costs.cheapest(SHOWN_CANDIDATES)
    candidates = tuple(costs.candidate(key) for key in shown)
    choice = candidates[0]
    if policy != "cost":
        first, second = RIVALS[policy](prompt, _pairs(fitting), turn, draws)
        choice = costs.candidate(costs.key(first.worker_id, "" if first is second else second.worker_id))
    return Decision(policy=policy, choice=choice, candidates=candidates, considered=considered)


def capacity(workers: Sequence[Worker]) -> int:
    """Most blocks that a prompt may have here: the best over all pairs of the smaller side, and over mixed workers."""
    best = {role: max((w.num_blocks for w in workers if w.role == role), default=0) for role in ("prefill", "decode")}
    mixed = max((w.num_blocks for w in workers if w.role == "mixed"), default=0)
    return max(min(best["prefill"], best["decode"]), mixed)


def _pairs(fitting: Sequence[Worker]) -> list[Pair]:
    """Pairs, and mixed workers as pairs with themselves, in order of ids."""
    readers = [w for w in fitting if w.role == "decode"]
    pairs = []
    for worker in fitting:
        if worker.role == "mixed":
            pairs.append((worker, worker))
        elif worker.role == "prefill":
            pairs += [(worker, reader) for reader in readers]
    return pairs
