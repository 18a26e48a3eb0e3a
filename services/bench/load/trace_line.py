"""One request of recorded traffic, whatever form it was recorded in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceLine:
    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # names of the prompt's blocks of 512 tokens; equal names are equal blocks
