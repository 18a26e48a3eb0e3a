"""Which block holds which name, as a forest: a block's parent holds the name that its own was made from.

A named block is *held* (a sequence uses it) or *idle* (kept in case its prefix comes again). Idle blocks without
children are the leaves, the only ones that may be evicted; so residency stays prefix-closed: where a name is resident,
all names before it are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

ROOT = -1  # parent of a first block


class PrefixTree:
    """Names of blocks, the order in which idle ones are evicted, and what has changed since the last `take_events`.

    The caller says when a block becomes idle or held, and keeps this true: the parent of a held block is held.
    """

    def __init__(self, num_blocks: int, *, by_use: bool = False) -> None:
        """Args: by_use: evict what was found least often first, and of equal ones what has been idle longest."""
        self._by_use = by_use
        self._block_of: dict[bytes, int] = {}
        self._name: list[bytes | None] = [None] * num_blocks
        self._parent = [ROOT] * num_blocks
        self._children: list[set[int]] = [set() for _ in range(num_blocks)]
        self._idle_since = [0] * num_blocks  # stamp of the release; 0: held or nameless
        self._uses = [0] * num_blocks  # how often a name was found since it was stored; stays 0 unless by_use
        self._leaves: list[tuple[int, int, int, int]] = []  # heap of (uses, stamp, entry number, block); some outdated
        self._entries = 0
        self._stored: dict[bytes, bytes] = {}  # name -> parent's name
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def depth(self, names: Sequence[bytes], most: int | None = None, near: int = 0) -> int:
        """How many leading names of a chain, ``most`` at most, are resident: a bisection, since residency is
        prefix-closed. Where ``near`` is the answer, two look-ups find that."""
        high = len(names) if most is None else most
        if 0 < near <= high and names[near - 1] in self._block_of:
            if near == high or names[near] not in self._block_of:
                return near
        elif near == 0 < high and most is not None and names[0] not in self._block_of:
            return 0
        low = 0
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._block_of:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def name(self, block: int) -> bytes | None:
        return self._name[block]

    def parent(self, block: int) -> int:
        return self._parent[block]

    def children(self, block: int) -> frozenset[int]:
        return frozenset(self._children[block])

    def is_idle(self, block: int) -> bool:
        return self._idle_since[block] > 0

    def add(self, block: int, name: bytes, parent: bytes, parent_block: int) -> None:
        """Give a held block a name that is not resident, under its parent's block or ROOT."""
        self._block_of[name] = block
        self._name[block] = name
        self._parent[block] = parent_block
        if parent_block != ROOT:
            self._children[parent_block].add(block)
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = parent

    def use(self, block: int) -> None:
        """A prompt has found the block's name."""
        self._uses[block] += self._by_use

    def hold(self, block: int) -> None:
        self._idle_since[block] = 0

    def idle(self, block: int, stamp: int) -> None:
        """``stamp`` (at least 1) orders evictions; the blocks of one release share it. Children first, then parents."""
        self._idle_since[block] = stamp
        self._offer(block)

    def oldest_run(self) -> Iterator[int]:
        """Yield blocks to `forget`, one by one: the leaf that has been idle longest, then up its chain.

        The run ends where the chain forks, is held, or became idle at another time. The caller forgets each block
        before it asks for the next, and may stop early.
        """
        while self._leaves:
            uses, stamp, _, block = self._leaves[0]
            if self._is_leaf(block, uses, stamp):
                break
            heapq.heappop(self._leaves)
        else:
            return
        while True:
            parent = self._parent[block]
            yield block
            if parent == ROOT or not self._is_leaf(parent, uses, stamp):
                return
            block = parent

    def forget(self, block: int) -> None:
        """Take the name from a block without children."""
        name = self._name[block]
        assert name is not None, f"block {block} has no name"
        assert not self._children[block], f"block {block} has children"
        del self._block_of[name]
        self._name[block] = None
        self._idle_since[block] = self._uses[block] = 0
        parent, self._parent[block] = self._parent[block], ROOT
        if parent != ROOT:
            self._children[parent].discard(block)
            self._offer(parent)
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def subtree(self, block: int) -> list[int]:
        """The block and all below it, children before parents."""
        found, ahead = [], [block]
        while ahead:
            found.append(ahead.pop())
            ahead.extend(self._children[found[-1]])
        return found[::-1]

    def take_events(self) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """(name, parent's name) of what was stored, parents first, and the names removed, since the last call."""
        stored, removed = list(self._stored.items()), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed

    def check(self) -> None:
        named = [b for b, name in enumerate(self._name) if name is not None]
        assert len(named) == len(self._block_of), "a name is held by two blocks"
        waiting = {(uses, stamp, block) for uses, stamp, _, block in self._leaves}
        for block in named:
            name, parent = self._name[block], self._parent[block]
            assert name is not None
            assert self._block_of[name] == block, f"block {block} and its name disagree"
            if parent != ROOT:
                assert self._name[parent] is not None, f"block {block} outlived its parent"
                assert block in self._children[parent], f"block {block} is unknown to its parent"
                assert self.is_idle(block) or not self.is_idle(parent), f"held block {block} has an idle parent"
            if self.is_idle(block) and not self._children[block]:
                entry = (self._uses[block], self._idle_since[block], block)
                assert entry in waiting, f"idle leaf {block} would never be evicted"
        children = sum(len(c) for c in self._children)
        assert children == sum(self._parent[b] != ROOT for b in named), "a child of no block"

    def _is_leaf(self, block: int, uses: int, stamp: int) -> bool:
        """Whether a block may be evicted, and has been used and idle as an entry says."""
        return self._idle_since[block] == stamp and self._uses[block] == uses and not self._children[block]

    def _offer(self, block: int) -> None:
        stamp = self._idle_since[block]
        if stamp and not self._children[block]:
            self._entries += 1
            heapq.heappush(self._leaves, (self._uses[block], stamp, self._entries, block))
            if len(self._leaves) > 2 * len(self._name) + 64:
                self._compact()

    def _compact(self) -> None:
        kept: dict[int, tuple[int, int, int, int]] = {}
        for entry in self._leaves:
            uses, stamp, _, block = entry
            if self._is_leaf(block, uses, stamp):
                kept[block] = entry
        self._leaves = list(kept.values())
        heapq.heapify(self._leaves)
