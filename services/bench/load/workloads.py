"""What is asked: lists of prompts with the number of tokens of their answers. Pure; equal seeds give equal lists."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.prompts import Prompt, Segment

_PREFIX, _OWN = 1, 2
"""First number of a segment's key after the seed: what prompts share, and what is one prompt's own."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels, and what noise it shows; see `services.bench.load.pictures`."""

    height: int
    width: int
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One request. ``text``, where there is one, is what is sent; the prompt then only says how long it is."""

    prompt: Prompt
    output_tokens: int
    text: str = ""
    context_tokens: int = 0  # of the turns before it, as planned
    pictures: tuple[Picture, ...] = ()  # after the text


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Unrelated prompts. Lengths are uniform within ``range_ratio`` of their means; a prefix may be common to all.

    ``long_share`` of them, drawn by the seed, have ``long_tokens`` instead.
    """

    input_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0
    long_share: float = 0.0
    long_tokens: int = 1500

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1 or self.prefix_tokens < 0:
            raise ConfigError("--random-input-len and --random-output-len must be at least 1, the prefix at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be from 0 to below 1, got {self.range_ratio}")
        if not 0 <= self.long_share <= 1 or self.long_tokens < 1:
            raise ConfigError(
                f"--random-long-share must be from 0 to 1 and --random-long-len at least 1, "
                f"got {self.long_share} and {self.long_tokens}"
            )

    def items(self, count: int, seed: int) -> list[Item]:
        rng = np.random.default_rng((seed, 0))
        inputs = self._lengths(self.input_tokens, count, rng)
        outputs = self._lengths(self.output_tokens, count, rng)
        for i in rng.permutation(count)[: round(self.long_share * count)]:
            inputs[i] = self.long_tokens
        shared = (Segment((seed, _PREFIX), self.prefix_tokens),) if self.prefix_tokens else ()
        return [
            Item((*shared, Segment((seed, _OWN, i), n)), out)
            for i, (n, out) in enumerate(zip(inputs, outputs, strict=True))
        ]

    def _lengths(self, mean: int, count: int, rng: np.random.Generator) -> list[int]:
        low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
        return [int(n) for n in rng.integers(max(1, low), high + 1, size=count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Each prompt is one of some prefixes, and a tail of its own. ``zipf_alpha`` 0 takes the prefixes in turn;

    above it the k-th is taken with a probability in proportion to k^−alpha.
    """

    prefix_tokens: int = 256
    suffix_tokens: int = 256
    num_prefixes: int = 10
    output_tokens: int = 128
    zipf_alpha: float = 0.0

    def __post_init__(self) -> None:
        lengths = (self.prefix_tokens, self.suffix_tokens, self.num_prefixes, self.output_tokens)
        if min(lengths) < 1 or self.zipf_alpha < 0:
            raise ConfigError("--prefix-repetition-* lengths and counts must be at least 1, the zipf alpha at least 0")

    def items(self, count: int, seed: int) -> list[Item]:
        if self.zipf_alpha:
            weights = np.arange(1, self.num_prefixes + 1, dtype=np.float64) ** -self.zipf_alpha
            rng = np.random.default_rng((seed, 0))
            groups = [int(g) for g in rng.choice(self.num_prefixes, size=count, p=weights / weights.sum())]
        else:
            groups = [i % self.num_prefixes for i in range(count)]
        return [
            Item(
                (Segment((seed, _PREFIX, g), self.prefix_tokens), Segment((seed, _OWN, i), self.suffix_tokens)),
                self.output_tokens,
            )
            for i, g in enumerate(groups)
        ]
