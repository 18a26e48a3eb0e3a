"""One batch of events as it lies in a Redis stream: msgpack ``[version, cleared, stored, removed]``, names packed."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from kvstore.blocks import NAME_BYTES
from kvstore.index.base import MAX_NAMES_PER_BATCH

VERSION = 1


class PayloadError(ValueError):
    """Bytes that are no batch of this version."""


def pack_names(names: Sequence[bytes]) -> bytes:
    return b"".join(names)


def pack_batch(stored: Sequence[bytes], removed: Sequence[bytes], *, cleared: bool = False) -> bytes:
    data: bytes = msgpack.packb([VERSION, cleared, pack_names(stored), pack_names(removed)])
    return data


def unpack_batch(data: bytes) -> tuple[bool, tuple[bytes, ...], tuple[bytes, ...]]:
    """(cleared, stored, removed). Raises PayloadError on anything else than what `pack_batch` wrote."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
    except Exception as exc:  # msgpack raises many kinds, all of them mean the same here
        raise PayloadError(f"undecodable batch of {len(data)} bytes: {exc}") from None
    if not isinstance(fields, list) or len(fields) != 4 or fields[0] != VERSION or not isinstance(fields[1], bool):
        raise PayloadError(f"no batch of version {VERSION}")
    return fields[1], _unpack_names(fields[2]), _unpack_names(fields[3])


def _unpack_names(packed: object) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes) or len(packed) % NAME_BYTES or len(packed) > MAX_NAMES_PER_BATCH * NAME_BYTES:
        raise PayloadError("block names that are not names")
    return tuple(packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES))
