"""Prompts from a file in ShareGPT's form: a JSON list of ``{"conversations": [{"from", "value"}, …]}``.

The first two turns of each conversation are a request and the length of its answer. What is too short to mean anything
or longer than the usual limits is left out, as other tools do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.prompts import segment_of
from services.bench.load.workloads import Item

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
CHARACTERS_PER_TOKEN = 4  # of English text, where there is no tokenizer to ask
Count = Callable[[str], int]


def estimate(said: str) -> int:
    """Tokens of a text, roughly."""
    return max(1, round(len(said) / CHARACTERS_PER_TOKEN))


def tokenizer_count(path: Path | None) -> Count:
    """How a tokenizer.json counts; `estimate` without one. Raises ConfigError where it cannot be read."""
    if path is None:
        return estimate
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as exc:  # the library raises its own for whatever is wrong with the file
        raise ConfigError(f"--tokenizer {path}: {exc}") from None
    return lambda said: len(tokenizer.encode(said, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGpt:
    """Requests of a file in an order that the seed decides. ``output_tokens``: for all answers; 0: each its own."""

    pairs: tuple[tuple[str, str], ...]
    count: Count
    output_tokens: int = 0

    def items(self, count: int, seed: int) -> list[Item]:
        """As many as there are, at most ``count``."""
        made: list[Item] = []
        for i in np.random.default_rng((seed, 0)).permutation(len(self.pairs)):
            if len(made) == count:
                break
            asked, answered = self.pairs[i]
            prompt, output = self.count(asked), self.output_tokens or self.count(answered)
            is_usual = prompt <= MAX_PROMPT_TOKENS and prompt + output <= MAX_TOKENS
            if min(prompt, output) >= MIN_TOKENS and is_usual:
                made.append(Item((segment_of(asked, prompt),), output, text=asked))
        if not made:
            raise ConfigError("--dataset-path: no conversation is of a usual length (4 to 1024 tokens of prompt)")
        return made


def read_sharegpt(path: Path) -> tuple[tuple[str, str], ...]:
    """(request, answer) of each conversation that has both.

    Raises:
        ConfigError: the file is not of that form.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        talks = [row.get("conversations", row.get("conversation", ())) for row in rows]
        pairs = tuple((str(t[0]["value"]), str(t[1]["value"])) for t in talks if len(t) >= 2)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"--dataset-path {path} is not of ShareGPT's form: {type(exc).__name__} {exc}") from None
    if not pairs:
        raise ConfigError(f"--dataset-path {path} holds no conversation with an answer")
    return pairs
