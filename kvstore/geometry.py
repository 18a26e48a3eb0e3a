"""The shape of KV memory: a list of KV groups, each laid out ``[layers, blocks, 2, kv_heads, block_size, head_dim]``.

A block of one layer is contiguous, and so is a slice of its heads: a layer of neighbouring blocks moves as one run.
Today every model has one group (full attention); a second group is a second entry in the list.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.errors import ConfigError, GeometryMismatch

LAYOUT_VERSION = 1
"""Raised whenever the order of bytes within a block changes; part of every block name."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table.

    Unequal groups exchange blocks only through a plan that maps one onto the other.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str  # a key of ITEMSIZE

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv.{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"kv.dtype must be one of {sorted(ITEMSIZE)}, got {self.dtype!r}")

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes in one layer, K and V together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    def blocks_within(self, num_bytes: int) -> int:
        """The capacity formula: so many blocks, over all layers, fit into so many bytes."""
        return num_bytes // (self.num_layers * self.block_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers."""
        return self.num_layers * self.block_bytes // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """All KV groups of a worker and the blocks each holds."""

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]  # blocks of each group

    def __post_init__(self) -> None:
        if not self.groups or len(self.groups) != len(self.num_blocks):
            raise ConfigError("kv.groups needs at least one group and a block count for each")
        if any(n < 1 for n in self.num_blocks):
            raise ConfigError(f"kv.num_blocks must be at least 1, got {self.num_blocks}")

    def group_bytes(self, group: int) -> int:
        """Bytes allocated for one group: layers × blocks × bytes of a block."""
        return self.groups[group].num_layers * self.num_blocks[group] * self.groups[group].block_bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.group_bytes(i) for i in range(len(self.groups)))

    def offset(self, group: int, layer: int, block: int) -> int:
        """Byte offset of one layer of one block from the start of the memory."""
        g = self.groups[group]
        base = sum(self.group_bytes(i) for i in range(group))
        return base + (layer * self.num_blocks[group] + block) * g.block_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"groups": [asdict(g) for g in self.groups], "num_blocks": list(self.num_blocks)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KVGeometry:
        return cls(groups=tuple(KVGroup(**g) for g in data["groups"]), num_blocks=tuple(data["num_blocks"]))


def check_same_layout(ours: KVGeometry, theirs: KVGeometry) -> None:
    """Raise GeometryMismatch, naming both values, unless blocks can be copied byte for byte."""
    if len(ours.groups) != len(theirs.groups):
        raise GeometryMismatch(f"kv groups differ: {len(ours.groups)} here, {len(theirs.groups)} there")
    for i, (a, b) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for name in ("block_size", "dtype", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(a, name) != getattr(b, name):
                raise GeometryMismatch(
                    f"kv group {i}: {name} differs: {getattr(a, name)} here, {getattr(b, name)} there"
                )
