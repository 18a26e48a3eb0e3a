"""Arrivals from a trace in Mooncake's form: named blocks, a faster or slower clock, and seeds that vary the times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.blocks import NAME_BYTES
from services.bench.load.trace import BLOCK_TOKENS, TraceLine, read_trace

__all__ = ["BLOCK_TOKENS", "Arrival", "arrivals", "halves", "load_trace", "varied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the trace."""

    number: int  # in the trace
    at_s: float
    num_tokens: int
    output_tokens: int
    names: tuple[bytes, ...]  # of the full blocks


def load_trace(path: Path) -> list[Arrival]:
    """All requests of a trace that compute anything, in order of time. Raises ConfigError as `read_trace` does."""
    return arrivals(sorted(read_trace(path), key=lambda line: line.at_s))


def arrivals(lines: Sequence[TraceLine]) -> list[Arrival]:
    """Named as the engine names blocks: a name stands for a block and all that comes before it."""
    chain: dict[tuple[bytes, int], bytes] = {}
    found = []
    for number, line in enumerate(lines):
        names: list[bytes] = []
        parent = bytes(NAME_BYTES)
        for block in line.blocks[: line.input_tokens // BLOCK_TOKENS]:
            parent = chain.setdefault((parent, block), (len(chain) + 1).to_bytes(NAME_BYTES, "big"))
            names.append(parent)
        if line.input_tokens > 0:
            found.append(
                Arrival(
                    number=number,
                    at_s=line.at_s,
                    num_tokens=line.input_tokens,
                    output_tokens=max(1, line.output_tokens),
                    names=tuple(names),
                )
            )
    return found


def halves(requests: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """The first and the second half of the requests; the second one's clock starts anew."""
    middle = len(requests) // 2
    second = requests[middle:]
    start_s = second[0].at_s if second else 0.0
    return list(requests[:middle]), [replace(r, at_s=r.at_s - start_s) for r in second]


def varied(
    requests: Sequence[Arrival], seed: int, *, scale_rate: float = 1.0, jitter_s: float = 3.0, keep: float = 0.95
) -> list[Arrival]:
    """Other arrivals of the same kind: each comes up to ``jitter_s`` later, some do not come, all come faster.

    Traces give times in steps of up to 3 s, which the jitter fills. Seed 0 changes nothing but the rate.

    Raises:
        ValueError: a rate or share that is none.
    """
    if not scale_rate > 0:
        raise ValueError(f"--scale-rate must be above 0, got {scale_rate}")
    if not 0 < keep <= 1:
        raise ValueError(f"the share of arrivals to keep must be above 0 and at most 1, got {keep}")
    if seed == 0:
        return [replace(r, at_s=r.at_s / scale_rate) for r in requests]
    rng = random.Random(seed)
    kept = [replace(r, at_s=(r.at_s + rng.random() * jitter_s) / scale_rate) for r in requests if rng.random() < keep]
    return sorted(kept, key=lambda r: r.at_s)
