"""How likely the model found tokens: the logarithms of the softmax over its raw logits.

Raw as vLLM's default is: before the mask of a grammar, biases, penalties, temperature and cuts. So the logprobs of a
token do not depend on how it was chosen, and equal those of the same token in a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.messages import TokenLogprobs
from services.engine.sequence import Work

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_ROWS_AT_ONCE = 64  # bounds the copies of a chunk's logits


def score(logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """The logprobs of one token for each row of ``logits`` [rows, vocab], and of the ``tops`` likeliest ones."""
    scored: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        stop = start + _ROWS_AT_ONCE
        scored += _score(logits[start:stop], token_ids[start:stop], tops[start:stop])
    return scored


def prompt_rows(work: Work) -> range:
    """Tokens of a work, counted from its start, whose logits say how likely the next prompt token was."""
    seq = work.sequence
    if seq.sampling.prompt_logprobs < 0:
        return range(0)
    return range(max(0, min(work.stop, seq.num_prompt_tokens - 1) - work.start))


def _score(logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    rows = logits.float()
    norms = torch.logsumexp(rows, dim=-1, keepdim=True)
    chosen = rows.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=rows.device)[:, None])
    ranks = ((rows > chosen).sum(-1) + 1).tolist()
    likeliest: dict[int, tuple[list[float], list[int]]] = {}
    for count in {top for top in tops if top > 0}:  # each by itself: a row must not depend on what others ask for
        members = [i for i, top in enumerate(tops) if top == count]
        asked = rows if len(members) == len(rows) else rows[members]
        found = asked.topk(min(count, rows.shape[-1]))
        pairs = zip(members, (found.values - norms[members]).tolist(), found.indices.tolist(), strict=True)
        likeliest |= {i: (values, ids) for i, values, ids in pairs}
    scored = []
    for i, value in enumerate((chosen - norms)[:, 0].tolist()):
        values, ids = likeliest.get(i, ([], []))
        scored.append(
            TokenLogprobs(
                logprob=max(value, FLOOR),
                rank=ranks[i],
                top_ids=tuple(ids),
                top_logprobs=tuple(max(v, FLOOR) for v in values),
            )
        )
    return scored
