"""What one owner of a pool refers to, and what a pool tells of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """An owner's blocks in the order of its tokens, and the names of the leading ones whose content is final."""

    blocks: list[int]
    names: list[bytes] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)  # for each name the block that holds it, maybe another owner's
    reserved: list[int] = field(default_factory=list)  # blocks that count as reserved
    is_reserved: bool = False
    stays_nameless: bool = False  # what follows the names so far never gets one

    def pins(self) -> list[int]:
        """Blocks of other owners that this one rests on: they hold names which its own blocks have the content of."""
        return [holder for block, holder in zip(self.blocks, self.holders, strict=False) if holder != block]

    def fork(self, num_shared: int) -> BlockTable:
        """The table of another owner of the first blocks, which from now on get no other names than they have."""
        if len(self.names) < num_shared:
            self.stays_nameless = True
        names, holders = self.names[:num_shared], self.holders[:num_shared]
        return BlockTable(self.blocks[:num_shared], names, holders, stays_nameless=len(names) < num_shared)

    def may_name(self, index: int, name: bytes, parent: bytes) -> bool:
        """Whether the block at ``index`` is the next to be named; False where it has that name or may have none.

        Raises ValueError where neither is so.
        """
        if index < len(self.names):
            if self.names[index] != name:
                raise ValueError(f"block {index} has another name already")
            return False
        if self.stays_nameless:
            return False
        if index != len(self.names) or index >= len(self.blocks):
            raise ValueError(f"block {index} of {len(self.blocks)} cannot be named, {len(self.names)} are")
        if self.is_reserved:
            raise ValueError(f"block {index} is reserved: what was received has no name before it is verified")
        if index and self.names[-1] != parent:
            raise ValueError(f"block {index} does not follow the block before it")
        return True

    def name(self, name: bytes, holder: int) -> None:
        self.names.append(name)
        self.holders.append(holder)

    def extend(self, blocks: Sequence[int]) -> None:
        self.blocks += blocks
        if self.is_reserved:
            self.reserved += blocks


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; ``total`` is the sum of the others."""

    total: int
    free: int
    used: int
    cached: int
    reserved: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """An owner's block table: ``cached_blocks`` leading ones hold their KV already, the rest are fresh, ascending."""

    block_ids: tuple[int, ...]
    cached_blocks: int
