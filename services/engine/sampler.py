"""The next token of each sequence from its logits.

Randomness depends on (seed, choice, position) alone: a token drawn again, elsewhere, in other company or after a
preemption is the same token, as far as the logits are. The draw inverts the cumulated distribution in the order of
token ids, not of probabilities, so that two nearly equal ones that change places do not move all that come after them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from services.engine.messages import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this take the most likely token."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits, and how its token is chosen."""

    sampling: Sampling
    position: int  # of the token among the outputs
    banned: Collection[int] = ()  # ids that may not come, such as end tokens before min_tokens


@dataclass(frozen=True, slots=True)
class BadLogits:
    """No token can be drawn from this row."""

    message: str


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """A number in [0, 1) that is a function of its arguments, on every machine."""
    key = b"".join(n.to_bytes(16, "little", signed=True) for n in (seed, choice, position))
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | BadLogits]:
    """A token id for each row of ``logits`` [rows, vocab], or why there is none; rows do not affect one another.

    Ties of a greedy choice go to the lower id. Temperature comes first, then top_k, then top_p over what is left.
    """
    rows = logits.float()
    if any(draw.banned for draw in draws):
        rows = rows.clone()
        for row, draw in zip(rows, draws, strict=True):
            row[list(draw.banned)] = float("-inf")
    best = rows.max(dim=-1)
    usable, greedy = torch.isfinite(best.values).tolist(), best.indices.tolist()
    tokens: list[int | BadLogits] = []
    for i, draw in enumerate(draws):
        if not usable[i]:
            tokens.append(BadLogits("the model gave no finite logits: its numbers overflowed, or the KV is damaged"))
        elif draw.sampling.temperature < GREEDY_BELOW:
            tokens.append(greedy[i])
        else:
            tokens.append(_draw(rows[i], draw))
    return tokens


def _draw(row: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    weights = ((row.double() - row.max().double()) / sampling.temperature).exp()
    weights = _cut(weights, sampling.top_k, sampling.top_p)
    total = weights.cumsum(0)
    goal = uniform(sampling.seed, draw.position) * float(total[-1])
    token = int(torch.searchsorted(total, goal, right=True))
    if token < len(weights) and weights[token] > 0:
        return token
    return int(weights.nonzero()[-1])  # rounding put the goal past the last id that has any weight


def _cut(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero all but the top_k likeliest, then all but the fewest of these that hold top_p; equals by lower id first."""
    size = len(weights)
    k = top_k if 0 < top_k < size else size
    if k == size and top_p >= 1:
        return weights
    ranked = torch.topk(weights, k).values if k < size else torch.sort(weights, descending=True).values
    if top_p < 1:
        cumulated = ranked.cumsum(0)
        k = min(k, int(torch.searchsorted(cumulated, top_p * float(cumulated[-1]))) + 1)
    edge = ranked[k - 1]
    kept = weights > edge
    ties = (weights == edge).nonzero()[:, 0][: k - int(kept.sum())]
    kept[ties] = True
    return torch.where(kept, weights, torch.zeros((), dtype=weights.dtype))
