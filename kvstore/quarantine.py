"""Blocks that a peer may still read or write, by the owner whose fence ends that."""

from __future__ import annotations

from collections.abc import Sequence


class Quarantine:
    """Counts, for each block, how many owners' fences it waits for."""

    def __init__(self, num_blocks: int) -> None:
        self._waits = [0] * num_blocks
        self._blocks: dict[str, list[int]] = {}

    def __contains__(self, block: int) -> bool:
        return self._waits[block] > 0

    def add(self, owner: str, blocks: Sequence[int]) -> None:
        self._blocks.setdefault(owner, []).extend(blocks)
        for block in blocks:
            self._waits[block] += 1

    def fenced(self, owner: str) -> list[int]:
        """End the owner's part; returns the blocks that wait for no other."""
        blocks = self._blocks.pop(owner, [])
        for block in blocks:
            self._waits[block] -= 1
        return [block for block in dict.fromkeys(blocks) if not self._waits[block]]

    def check(self) -> None:
        waits = [0] * len(self._waits)
        for blocks in self._blocks.values():
            for block in blocks:
                waits[block] += 1
        assert waits == self._waits, "quarantine counts differ from the owners' blocks"
