"""One batch of events as it lies in a Redis stream, in msgpack, names packed.

    [1, cleared, stored, removed]           of the device's blocks
    [2, cleared, stored, removed, tier]     of another tier

A writer gives the lowest version that can say it, so that readers one version older follow it in all they know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from kvstore.blocks import NAME_BYTES
from kvstore.index.base import MAX_NAMES_PER_BATCH, NUM_TIERS, Tier

VERSION = 2
_FIELDS = {1: 4, 2: 5}


class PayloadError(ValueError):
    """Bytes that are no batch of a version known here."""


class Payload(NamedTuple):
    cleared: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    tier: int = Tier.DEVICE


def pack_names(names: Sequence[bytes], tier: int = Tier.DEVICE) -> bytes:
    """As the set in Redis holds them: behind the name comes the tier, but for the device's blocks."""
    mark = bytes([tier]) if tier else b""
    return b"".join(name + mark for name in names)


def pack_batch(
    stored: Sequence[bytes], removed: Sequence[bytes], *, cleared: bool = False, tier: int = Tier.DEVICE
) -> bytes:
    fields = [cleared, b"".join(stored), b"".join(removed)]
    data: bytes = msgpack.packb([VERSION, *fields, int(tier)] if tier else [1, *fields])
    return data


def unpack_batch(data: bytes) -> Payload:
    """Raises PayloadError on anything else than what `pack_batch` writes, now or one version ago."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
    except Exception as exc:  # msgpack raises many kinds, all of them mean the same here
        raise PayloadError(f"undecodable batch of {len(data)} bytes: {exc}") from None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], int):
        raise PayloadError("no batch")
    if _FIELDS.get(fields[0]) != len(fields) or not isinstance(fields[1], bool):
        raise PayloadError(f"no batch of version {VERSION} or {VERSION - 1}")
    tier = fields[4] if len(fields) > 4 else Tier.DEVICE
    if not isinstance(tier, int) or not 0 <= tier < NUM_TIERS:
        raise PayloadError("a tier that is none")
    return Payload(fields[1], _unpack_names(fields[2]), _unpack_names(fields[3]), tier)


def _unpack_names(packed: object) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes) or len(packed) % NAME_BYTES or len(packed) > MAX_NAMES_PER_BATCH * NAME_BYTES:
        raise PayloadError("block names that are not names")
    return tuple(packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES))
