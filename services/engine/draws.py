"""Between the model and the scheduler: which rows of logits a step needs, and what comes out of them.

    wanted_rows(work) ─► the model computes these rows ─► Drawer.take ─► tokens, logprobs, failures

A work's last row gives the next token, once for each choice; rows before it are computed only where somebody asked how
likely the prompt was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from services.engine.grammar import Grammars
from services.engine.intake import Limits
from services.engine.logprobs import prompt_rows, score
from services.engine.messages import TokenLogprobs
from services.engine.sampler import BadLogits, Draw, sample
from services.engine.sequence import Work
from services.protocol.errors import ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class OneDraw:
    """A token to be drawn."""

    index: int  # of its work
    key: str  # what the scheduler knows the token by
    choice: int
    row: int  # of the logits


@dataclass(frozen=True, slots=True)
class Wanted:
    """``rows``: (index of a work, token of it counted from its start), first those that tokens are drawn from."""

    rows: tuple[tuple[int, int], ...]
    draws: tuple[OneDraw, ...]
    prompts: tuple[tuple[int, int, int], ...]  # (index of a work, its first row, how many)


@dataclass(frozen=True, slots=True)
class Taken:
    """What came out of a step's logits."""

    tokens: Mapping[str, int] = field(default_factory=dict)  # by the keys of `Work.draws`
    failures: Mapping[str, str] = field(default_factory=dict)  # by sequence id
    logprobs: Mapping[tuple[str, int], TokenLogprobs] = field(default_factory=dict)  # by (group id, choice)
    prompt_logprobs: Mapping[str, tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=dict)
    """By group id: index of the first prompt token told about, and what is told."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)  # by sequence id, float32

    def __or__(self, other: Taken) -> Taken:
        return Taken(*({**getattr(self, f.name), **getattr(other, f.name)} for f in fields(Taken)))


def wanted_rows(work: Sequence[Work]) -> Wanted:
    """What to compute for one step."""
    rows: list[tuple[int, int]] = []
    draws: list[OneDraw] = []
    for i, item in enumerate(work):
        mine = [OneDraw(i, key, choice, len(rows)) for key, choice in item.draws]
        if mine:
            draws += mine
            rows.append((i, item.count - 1))
    prompts = []
    for i, item in enumerate(work):
        asked = prompt_rows(item)
        if asked:
            prompts.append((i, len(rows), len(asked)))
            rows += [(i, token) for token in asked]
    return Wanted(tuple(rows), tuple(draws), tuple(prompts))


class Drawer:
    """Draws tokens for one engine; keeps the state of its grammars."""

    def __init__(self, limits: Limits, grammars: Grammars | None = None) -> None:
        """``grammars`` None: sequences with a grammar fail."""
        self._limits = limits
        self._grammars = grammars

    def take(self, work: Sequence[Work], wanted: Wanted, logits: torch.Tensor, failures: Mapping[str, str]) -> Taken:
        """Args:
        logits: [len(wanted.rows), vocab], left as they are.
        failures: sequences that failed already; nothing is drawn for them, and the result names them too.
        """
        failed = dict(failures)
        ready: list[tuple[OneDraw, Draw]] = []
        for one in wanted.draws:
            seq_id = work[one.index].sequence.seq_id
            try:
                if seq_id not in failed:
                    ready.append((one, self._draw(work[one.index], one.choice)))
            except RequestError as exc:
                failed[seq_id] = exc.message
        rows = _rows(logits, [one.row for one, _ in ready])
        drawn = sample(rows, [draw for _, draw in ready]) if ready else []
        for (one, _), token in zip(ready, drawn, strict=True):
            if isinstance(token, BadLogits):
                failed.setdefault(work[one.index].sequence.seq_id, token.message)
        tokens: dict[str, int] = {}
        told: list[tuple[OneDraw, int]] = []
        for i, ((one, draw), token) in enumerate(zip(ready, drawn, strict=True)):
            if isinstance(token, BadLogits) or work[one.index].sequence.seq_id in failed:
                continue
            tokens[one.key] = token
            if draw.sampling.logprobs >= 0:
                told.append((one, i))
        prompts = [_of_prompt(work[i], logits[row : row + count]) for i, row, count in wanted.prompts]
        return Taken(
            tokens=tokens, failures=failed, logprobs=_scores(work, rows, told, tokens), prompt_logprobs=dict(prompts)
        )

    def _draw(self, work: Work, choice: int) -> Draw:
        """Raises RequestError where the outputs so far left their grammar."""
        seq = work.sequence
        sampling, position = seq.sampling, seq.num_outputs
        allowed = None
        if sampling.grammar is not None:
            if self._grammars is None:
                raise RequestError(ErrorCode.INTERNAL, "this engine has no grammars")
            outputs = seq.token_ids[seq.num_prompt_tokens :]
            allowed = self._grammars.allowed((seq.group_id, choice), sampling.grammar, outputs)
        return Draw(
            sampling,
            position,
            self._limits.end_tokens(sampling) if position < sampling.min_tokens else (),
            choice,
            seq.token_ids,
            seq.num_prompt_tokens,
            allowed,
        )


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows; a view where they lie in order, as they do without further choices."""
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[list(rows)]


def _scores(
    work: Sequence[Work], rows: torch.Tensor, told: Sequence[tuple[OneDraw, int]], tokens: Mapping[str, int]
) -> dict[tuple[str, int], TokenLogprobs]:
    if not told:
        return {}
    sequences = [work[one.index].sequence for one, _ in told]
    tops = [seq.sampling.logprobs for seq in sequences]
    scored = score(rows[[i for _, i in told]], [tokens[one.key] for one, _ in told], tops)
    return {(seq.group_id, one.choice): s for seq, (one, _), s in zip(sequences, told, scored, strict=True)}


def _of_prompt(work: Work, logits: torch.Tensor) -> tuple[str, tuple[int, tuple[TokenLogprobs, ...]]]:
    seq, first = work.sequence, work.start + 1
    tops = [seq.sampling.prompt_logprobs] * len(logits)
    scored = score(logits, seq.token_ids[first : first + len(logits)], tops)
    return seq.group_id, (first, tuple(scored))
