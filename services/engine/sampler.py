"""The next token of each sequence from its logits.

Randomness depends on (seed, choice, position) alone: a token drawn again, elsewhere, in other company or after a
preemption is the same token, as far as the logits are. The draw inverts the cumulated distribution in the order of
token ids, not of probabilities, so that two nearly equal ones that change places do not move all that come after them.

    raw logits ─► mask of the grammar ─► banned ids ─► biases ─► penalties ─┬─ greedy: the largest
                                                                           └─ temperature ─► min_p ─► top_k ─► top_p

Order and meaning are vLLM's. Rows that ask for nothing before the draw share one maximum; others are copied first, so
no request changes another's row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from services.engine.messages import Sampling
from services.engine.penalties import Occurred, add_biases, apply_penalties

GREEDY_BELOW = 1e-5
"""Temperatures under this take the most likely token."""
_HEADS = (512, 4096)  # tokens looked at first for top_p; sorting a whole vocabulary takes far longer


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits, and how its token is chosen."""

    sampling: Sampling
    position: int  # of the token among the outputs
    banned: Collection[int] = ()  # ids that may not come, such as end tokens before min_tokens
    choice: int = 0
    token_ids: Sequence[int] = ()  # prompt and outputs; read only where penalties are asked for
    num_prompt_tokens: int = 0
    allowed: torch.Tensor | None = None  # [vocab] bool: what the grammar lets come; None: everything

    @property
    def reshapes(self) -> bool:
        """Whether the row changes before a token is taken from it."""
        sampling = self.sampling
        return bool(self.banned or sampling.penalties or sampling.logit_bias or self.allowed is not None)


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

    Ties of a greedy choice go to the lower id. ``logits`` are left as they are.
    """
    plain = logits.float()
    best = plain.max(dim=-1)
    usable, greedy = torch.isfinite(best.values).tolist(), best.indices.tolist()
    reshaped = [i for i, draw in enumerate(draws) if draw.reshapes]
    rows: dict[int, torch.Tensor] = {}
    if reshaped:
        own = _reshaped(plain[reshaped], [draws[i] for i in reshaped])
        best = own.max(dim=-1)
        for i, row, token, is_usable in zip(
            reshaped, own, best.indices.tolist(), torch.isfinite(best.values).tolist(), strict=True
        ):
            rows[i], greedy[i], usable[i] = row, token, usable[i] and is_usable
    tokens: list[int | BadLogits] = []
    for i, draw in enumerate(draws):
        if not usable[i]:
            tokens.append(BadLogits("the model gave no finite logits: its numbers overflowed, or the KV is damaged"))
        elif draw.sampling.temperature < GREEDY_BELOW:
            tokens.append(greedy[i])
        else:
            tokens.append(_draw(rows[i] if i in rows else plain[i], draw))
    return tokens


def _reshaped(rows: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """``rows`` [rows, vocab], a copy of the model's, as each draw wants them."""
    masked = [i for i, draw in enumerate(draws) if draw.allowed is not None]
    if masked:
        masks = torch.stack([draw.allowed for draw in draws if draw.allowed is not None]).to(rows.device)
        target = rows if len(masked) == len(draws) else rows[masked]
        rows[masked] = target.masked_fill(~masks, float("-inf"))
    for row, draw in zip(rows, draws, strict=True):
        banned = list(draw.banned)
        # a grammar at its end knows better than min_tokens
        if banned and (draw.allowed is None or _leaves_any(draw.allowed, banned)):
            row[banned] = float("-inf")
    add_biases(rows, [draw.sampling.logit_bias for draw in draws])
    penalized = []
    for i, draw in enumerate(draws):
        if draw.sampling.penalties is not None:
            prompt, outputs = draw.token_ids[: draw.num_prompt_tokens], draw.token_ids[draw.num_prompt_tokens :]
            penalized.append(Occurred(i, draw.sampling.penalties, prompt, outputs))
    apply_penalties(rows, penalized)
    return rows


def _leaves_any(allowed: torch.Tensor, banned: list[int]) -> bool:
    left = allowed.clone()
    left[banned] = False
    return bool(left.any())


def _draw(row: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    weights = ((row.double() - row.max().double()) / sampling.temperature).exp()
    if sampling.min_p > 0:
        weights = torch.where(weights < sampling.min_p, torch.zeros((), dtype=weights.dtype), weights)
    weights = _cut(weights, sampling.top_k, sampling.top_p)
    total = weights.cumsum(0)
    goal = uniform(sampling.seed, draw.position, draw.choice) * float(total[-1])
    token = int(torch.searchsorted(total, goal, right=True))
    if token < len(weights) and weights[token] > 0:
        return token
    return int(weights.nonzero()[-1])  # rounding put the goal past the last id that has any weight


def _ranked(weights: torch.Tensor, k: int, top_p: float) -> tuple[torch.Tensor, float]:
    """The largest weights, falling, as many as hold ``top_p`` of the largest k; and what these k hold together."""
    if k < len(weights):
        ranked = torch.topk(weights, k).values
        return ranked, float(ranked.cumsum(0)[-1])
    total = float(weights.cumsum(0)[-1])
    for size in _HEADS:
        head = torch.topk(weights, size).values if 4 * size < k else weights[:0]
        if float(head.sum()) > top_p * total * (1 + 1e-9):  # the margin is for sums in another order
            return head, total
    return torch.sort(weights, descending=True).values, total


def _cut(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero all but the top_k likeliest, then all but the fewest of these that hold top_p; equals by lower id first."""
    size = len(weights)
    k = top_k if 0 < top_k < size else size
    if k == size and top_p >= 1:
        return weights
    ranked, total = _ranked(weights, k, top_p)
    if top_p < 1:
        k = min(k, int(torch.searchsorted(ranked.cumsum(0), top_p * total)) + 1)
    edge = ranked[k - 1]
    kept = weights > edge
    ties = (weights == edge).nonzero()[:, 0][: k - int(kept.sum())]
    kept[ties] = True
    return torch.where(kept, weights, torch.zeros((), dtype=weights.dtype))
