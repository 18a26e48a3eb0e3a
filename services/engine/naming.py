"""Names of a sequence's full blocks, chained from its root; see `kvstore.blocks`."""

from __future__ import annotations

from kvstore.blocks import extend_name
from kvstore.pool import BlockPool
from services.engine.sequence import Sequence


def name_ahead(seq: Sequence, size: int) -> None:
    """Name the full blocks of outputs that came along, before they are computed, so that they are found if cached."""
    for i in range(len(seq.names), len(seq.token_ids) // size) if seq.root else ():
        seq.names.append(_next_name(seq, i, size))


def name_computed(seq: Sequence, size: int, pool: BlockPool) -> bool:
    """Give the pool the names of what has become full since the last call; False where it holds others.

    Sequences without a root stay nameless, and so does the rest of one whose names do not follow one another: that is
    its sender's error, which must not reach others.
    """
    if seq.num_computed_tokens // size <= seq.num_named_blocks or not seq.root or not pool.has_prefix_cache:
        return True
    for i in range(seq.num_named_blocks, seq.num_computed_tokens // size):
        if i == len(seq.names):
            seq.names.append(_next_name(seq, i, size))
        try:
            pool.name_block(seq.seq_id, i, seq.names[i], seq.names[i - 1] if i else seq.root)
        except ValueError:
            seq.root = b""
            return False
        seq.num_named_blocks = i + 1
    return True


def _next_name(seq: Sequence, index: int, size: int) -> bytes:
    return extend_name(seq.names[index - 1] if index else seq.root, seq.token_ids[index * size : (index + 1) * size])
