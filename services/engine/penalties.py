"""What a request takes from or gives to the logits of single tokens, before one is drawn.

In this order, as in vLLM: biases; then the repetition penalty of every token of the prompt or of the outputs (a logit
above 0 is divided by it, one below multiplied); then what the outputs cost: frequency for each time, presence once. All
of it is a function of ids that every worker has, so it outlives hand-offs, preemptions and recomputes. Only logits of
tokens that occurred are touched, for all rows in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.engine.messages import Penalties


@dataclass(frozen=True, slots=True)
class Occurred:
    """The ids that the penalties of one row look at."""

    row: int
    penalties: Penalties
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def add_biases(rows: torch.Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Change ``rows`` [rows, vocab] in place; ``biases``: (token id, what is added) of each row."""
    found = [(i, bias) for i, bias in enumerate(biases) if bias]
    if found:
        cells = [_cells(i, np.array([token for token, _ in bias], dtype=np.int64)) for i, bias in found]
        at, values = _joined(cells, [np.array([value for _, value in bias]) for _, bias in found], rows)
        rows[at] += values


def apply_penalties(rows: torch.Tensor, occurred: Sequence[Occurred]) -> None:
    """Change ``rows`` [rows, vocab] in place; rows that nobody names keep their values."""
    seen, factors, spent, costs = [], [], [], []
    for o in occurred:
        p, outputs = o.penalties, np.asarray(o.output_ids, dtype=np.int64)
        if p.repetition != 1:
            ids = np.unique(np.concatenate([np.asarray(o.prompt_ids, dtype=np.int64), outputs]))
            seen.append(_cells(o.row, ids))
            factors.append(np.full(len(ids), p.repetition))
        if p.frequency or p.presence:
            ids, counts = np.unique(outputs, return_counts=True)
            spent.append(_cells(o.row, ids))
            costs.append(p.frequency * counts + p.presence)
    if seen:
        at, divisors = _joined(seen, factors, rows)
        values = rows[at]
        rows[at] = torch.where(values > 0, values / divisors, values * divisors)
    if spent:
        at, amounts = _joined(spent, costs, rows)
        rows[at] -= amounts


Cells = npt.NDArray[np.int64]


def _cells(row: int, ids: Cells) -> Cells:
    return np.stack([np.full(len(ids), row), ids])


def _joined(
    cells: Sequence[Cells], values: Sequence[npt.NDArray[Any]], rows: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Indices of all cells, and what belongs to each, as ``rows`` has it."""
    at = torch.from_numpy(np.concatenate(cells, axis=1)).to(rows.device)
    return (at[0], at[1]), torch.from_numpy(np.concatenate(values)).to(rows.device, rows.dtype)
