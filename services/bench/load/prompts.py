"""Prompts as recipes: a few numbers that make the same tokens each time, so that shared prefixes are shared by design.

A recipe is a row of segments. Segments of one key begin with the same tokens, whatever their length; other keys give
unrelated tokens. A recipe becomes token ids, or text of common words where a server takes no ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good sentence man "
    "think say great where help through much before line right too mean old any same tell boy follow came want show "
    "also around form three small set put end does another well large must big even such because turn here why ask "
    "went men read need land different home us move try kind hand picture again change off play spell air away animal "
    "house point page letter mother answer found study still learn should world high every near add food between own "
    "below country plant last school father keep tree never start city earth eye light thought head under story saw "
    "left few while along might close something seem next hard open example begin life always those both paper "
    "together got group often run"
)
WORDS = tuple(_TEXT.split())
"""Words that nearly every tokenizer knows as one token."""


@dataclass(frozen=True, slots=True)
class Segment:
    key: tuple[int, ...]
    num_tokens: int


Prompt = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class IdRange:
    """Token ids that prompts are made of: low ≤ id < high. Low ids are left out: special tokens lie there."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"token ids need 0 <= low < high, got {self.low} and {self.high}")


def num_tokens(prompt: Prompt) -> int:
    return sum(segment.num_tokens for segment in prompt)


def token_ids(prompt: Prompt, ids: IdRange) -> list[int]:
    """The prompt's ids; equal recipes give equal ids on every machine."""
    parts = [_numbers(segment) % (ids.high - ids.low) + ids.low for segment in prompt]
    return [int(x) for part in parts for x in part.tolist()]


def text(prompt: Prompt) -> str:
    """The prompt as common words, one for each token; a tokenizer may count some words differently."""
    return " ".join(WORDS[i % len(WORDS)] for i in token_ids(prompt, IdRange(0, len(WORDS))))


def segment_of(said: str, num_tokens: int) -> Segment:
    """Stands for a text that is sent as it is: equal texts have equal keys."""
    digest = hashlib.blake2b(said.encode(), digest_size=16).digest()
    return Segment(tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)), num_tokens)


def _numbers(segment: Segment) -> NDArray[np.int64]:
    raw = np.random.PCG64(np.random.SeedSequence(segment.key)).random_raw(segment.num_tokens)
    return (raw >> np.uint64(33)).astype(np.int64)


def shared_tokens(prompts: Iterable[Prompt]) -> list[int]:
    """For each prompt, the leading tokens that some prompt before it has too: the most that a cold cache can hit."""
    longest: dict[tuple[int, tuple[int, ...]], int] = {}  # (node, key) -> most tokens seen there
    nodes: dict[tuple[int, Segment], int] = {}
    found: list[int] = []
    for prompt in prompts:
        node, shared = 0, 0
        for segment in prompt:
            seen = longest.get((node, segment.key), 0)  # 0 behind a node that is new
            shared += min(seen, segment.num_tokens)
            longest[node, segment.key] = max(seen, segment.num_tokens)
            node = nodes.setdefault((node, segment), len(nodes) + 1)
        found.append(shared)
    return found
