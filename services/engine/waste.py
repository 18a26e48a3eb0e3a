"""KV memory that is given out and holds nothing: the two kinds of waste of a paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVWaste:
    """Of running sequences, at one moment."""

    unused_tokens: int  # slots of last blocks behind the last token
    unwritten_blocks: int  # blocks of prompts that no chunk has reached yet


def waste_of(running: Iterable[Sequence], block_size: int) -> KVWaste:
    """What running sequences hold without need. A block behind the last token counts with all its slots as unused."""
    unused = unwritten = 0
    for seq in running:
        num_blocks, num_tokens = len(seq.block_ids), len(seq.token_ids)
        unused += max(0, num_blocks * block_size - num_tokens)
        needed = min(num_blocks, -(-num_tokens // block_size))
        unwritten += needed - min(needed, -(-seq.num_computed_tokens // block_size))
    return KVWaste(unused, unwritten)
