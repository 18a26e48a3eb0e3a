"""xxh3-64 over extents of KV memory, in the reader's layout.

The hash finds what got lost, doubled or overwritten on the way; it is no protection against somebody who may write.
xxhash lets other threads run while it reads a large buffer, so hashing belongs in threads of the transfer process.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvstore.geometry import KVGeometry
from kvstore.transfer.messages import Extent


def digest_bytes(memory: memoryview, offset: int, num_bytes: int) -> int:
    """The 64-bit digest of one contiguous piece of memory."""
    value: int = xxhash.xxh3_64_intdigest(memory[offset : offset + num_bytes])
    return value


def extent_span(geometry: KVGeometry, extent: Extent) -> tuple[int, int] | None:
    """(offset, bytes) of an extent in a memory of this geometry; None where it names what the memory does not have.

    Extents come from another worker, so nothing about them is taken for granted.
    """
    group = geometry.groups[0]
    if not (0 <= extent.layer < group.num_layers and extent.block >= 0 and extent.count >= 1):
        return None
    if extent.block + extent.count > geometry.num_blocks[0]:
        return None
    return geometry.offset(0, extent.layer, extent.block), extent.count * group.block_bytes


def find_bad(memory: memoryview, geometry: KVGeometry, extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """Those extents whose bytes in ``memory`` do not have their digest."""
    bad = []
    for extent in extents:
        span = extent_span(geometry, extent)
        if span is None or digest_bytes(memory, *span) != extent.digest:
            bad.append(extent)
    return tuple(bad)
