"""Which bytes of which layer go where: pairs of blocks merged into runs that are contiguous in both memories.

Blocks of one layer lie side by side (`kvstore.geometry`), so neighbours move as one write. Layers never merge:
between two layers of a block lie all other blocks. Only memories of one KV group and of equal layout are planned;
anything else raises GeometryMismatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import GeometryMismatch
from kvstore.geometry import KVGeometry, check_same_layout
from kvstore.transfer.base import Write


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` blocks of one layer, neighbours in the writer's memory and in the reader's."""

    layer: int
    source_block: int
    target_block: int
    count: int


def merge_blocks(layer: int, source_ids: Sequence[int], target_ids: Sequence[int], first: int, count: int) -> list[Run]:
    """Runs that copy the blocks at indices ``first`` to ``first + count`` of both block lists, order kept.

    Raises IndexError where a list is too short.
    """
    runs: list[Run] = []
    start, stop = first, first + count
    for index in range(first + 1, stop + 1):
        source, target, ahead = source_ids[start], target_ids[start], index - start
        if index < stop and (source_ids[index], target_ids[index]) == (source + ahead, target + ahead):
            continue
        runs.append(Run(layer, source, target, ahead))
        start = index
    return runs


@dataclass(frozen=True, slots=True)
class Plan:
    """Turns runs into byte offsets, between two memories that `make_plan` found exchangeable."""

    source: KVGeometry
    target: KVGeometry

    def num_bytes(self, run: Run) -> int:
        return run.count * self.source.groups[0].block_bytes

    def source_offset(self, run: Run) -> int:
        return self.source.offset(0, run.layer, run.source_block)

    def write(self, run: Run, ticket_id: str) -> Write:
        return Write(
            source_offset=self.source_offset(run),
            target_offset=self.target.offset(0, run.layer, run.target_block),
            num_bytes=self.num_bytes(run),
            ticket_id=ticket_id,
        )


def make_plan(source: KVGeometry, target: KVGeometry, source_ids: Sequence[int], target_ids: Sequence[int]) -> Plan:
    """Check once what every run of a ticket relies on.

    Raises:
        GeometryMismatch: unequal layouts, several KV groups, lists of unequal length, or a block that a memory does
        not have.
    """
    check_same_layout(source, target)
    if len(source.groups) != 1:
        raise GeometryMismatch(f"only one KV group can be handed off, this model has {len(source.groups)}")
    if len(source_ids) != len(target_ids):
        raise GeometryMismatch(f"the prompt has {len(source_ids)} blocks, the grant names {len(target_ids)}")
    for name, ids, geometry in (("source", source_ids, source), ("target", target_ids, target)):
        if ids and not (min(ids) >= 0 and max(ids) < geometry.num_blocks[0]):
            raise GeometryMismatch(f"{name} block ids reach {max(ids)}, the memory has {geometry.num_blocks[0]} blocks")
        if len(set(ids)) != len(ids):
            raise GeometryMismatch(f"{name} block ids name a block twice")
    return Plan(source, target)
