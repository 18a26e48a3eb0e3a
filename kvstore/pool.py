"""The block allocator of one KV group: who holds which block, what is kept for reuse, what must not be touched.

            acquire, extend             activate
    FREE ─────────────────► RESERVED ─────────────► USED ──┬─ release, named ───► CACHED ─┬─ acquire by name ─► USED
      ▲ └──────────────────────────────────────────► ▲     │                              └─ evicted ─► FREE
      │                                                    ├─ release, nameless ► FREE
      └────────── unquarantine ◄── QUARANTINED ◄───────────┴─ release(quarantine=True)

    free + used + cached + reserved + quarantined = total, always.

A block is used while an owner refers to it, however many do. A name is given once a block holds its final content. A
quarantined block may still be written or read by a peer: nobody gets it until its owner's fence (`unquarantine`).

Pure: no clock, no I/O, no torch. One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvstore.errors import NeverFits, OutOfBlocks
from kvstore.prefix import ROOT, PrefixTree
from kvstore.quarantine import Quarantine
from kvstore.runs import FreeRuns
from kvstore.table import Allocation, BlockTable, PoolCounts

MAX_RUNS = 4
"""Fresh blocks of one call come in so many runs of neighbours, where evicting a little more achieves it."""


class BlockPool:
    """Blocks 0..num_blocks−1 and their owners (any text, such as a sequence id)."""

    def __init__(self, num_blocks: int, prefix_cache: bool = True, eviction: str = "lru") -> None:
        """Without ``prefix_cache`` no block ever gets a name, so nothing is kept after a release.

        Args:
            eviction: ``lru``, idle longest goes first; ``lfu``, found least often, then idle longest.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.has_prefix_cache = prefix_cache
        self._free = FreeRuns(num_blocks)
        self._tree = PrefixTree(num_blocks, by_use=eviction == "lfu")
        self._refs = [0] * num_blocks  # owners that use the block, or rest on it as the holder of one of their names
        self._tables: dict[str, BlockTable] = {}
        self._quarantine = Quarantine(num_blocks)
        self._num_cached = 0
        self._num_reserved = 0
        self._num_quarantined = 0
        self._stamp = 0

    def lookup(self, names: Sequence[bytes], most: int | None = None, near: int = 0) -> int:
        """How many leading blocks (at most ``most``) of the prompt with these names are here, cached or in use.

        ``near``: the last answer; it is tried first.
        """
        return self._tree.depth(names, most, near)

    def would_free(self, owners: Sequence[str]) -> int:
        """Blocks that become free or cached when these owners are released."""
        uses = Counter(b for owner in owners for b in (*self._table(owner).blocks, *self._table(owner).pins()))
        return sum(self._refs[block] == count and block not in self._quarantine for block, count in uses.items())

    def can_acquire(self, num_blocks: int, names: Sequence[bytes] = ()) -> bool:
        """Whether `acquire` with the same arguments would succeed now."""
        return self._missing(num_blocks, self._hits(num_blocks, names)) <= 0

    def acquire(
        self, owner: str, num_blocks: int, names: Sequence[bytes] = (), *, reserved: bool = False
    ) -> Allocation:
        """Give a new owner ``num_blocks`` blocks, all or none.

        Args:
            names: of those leading blocks that may come from the cache; the caller has capped them, so that a prompt
                found whole still computes its last token.
            reserved: the fresh blocks count as reserved, and get no name, until `activate`.

        Raises:
            NeverFits: the whole pool is smaller.
            OutOfBlocks: too few blocks are free or cached now.
        """
        if owner in self._tables or num_blocks < 0:
            raise ValueError(f"{owner!r} holds blocks already" if num_blocks >= 0 else f"num_blocks is {num_blocks}")
        if num_blocks > self.num_blocks:
            raise NeverFits(f"{num_blocks} KV blocks are needed, the pool has {self.num_blocks} (engine.num_blocks)")
        hits = self._hits(num_blocks, names)
        self._refuse_if_short(self._missing(num_blocks, hits), num_blocks)
        for block in hits:
            self._tree.use(block)
            self._ref(block)
        fresh = self._fresh(num_blocks - len(hits), hits[-1] if hits else None)
        table = BlockTable(list(hits), list(names[: len(hits)]), list(hits), is_reserved=reserved)
        self._tables[owner] = table
        self._append(table, fresh)
        return Allocation(tuple(table.blocks), len(hits))

    def activate(self, owner: str) -> None:
        """Reserved blocks become used, since their content has been verified. Nothing happens the second time."""
        table = self._table(owner)
        self._num_reserved -= len(table.reserved)
        table.reserved, table.is_reserved = [], False

    def extend(self, owner: str, num_blocks: int = 1) -> tuple[int, ...]:
        """Append fresh blocks to the owner's table, all or none.

        Raises:
            OutOfBlocks: too few blocks are free or cached now.
        """
        table = self._table(owner)
        self._refuse_if_short(num_blocks - len(self._free) - self._num_cached, num_blocks)
        fresh = self._fresh(num_blocks, table.blocks[-1] if table.blocks else None)
        self._append(table, fresh)
        return tuple(fresh)

    def fork(self, owner: str, new_owner: str, num_shared: int, num_fresh: int = 0) -> tuple[int, ...]:
        """Give a new owner the first ``num_shared`` blocks of another by reference, and fresh ones after them, all or
        none; returns its table. Nobody may write into shared blocks any more: what differs goes into fresh ones.

        Shared blocks that have no name yet never get one, nor does what either owner puts after them.

        Raises:
            OutOfBlocks: too few blocks are free or cached now.
        """
        source = self._table(owner)
        if new_owner in self._tables or source.is_reserved or not 0 <= num_shared <= len(source.blocks):
            raise ValueError(f"{new_owner!r} cannot share {num_shared} blocks of {owner!r}")
        self._refuse_if_short(num_fresh - len(self._free) - self._num_cached, num_fresh)
        table = self._tables[new_owner] = source.fork(num_shared)
        for block in (*table.blocks, *table.pins()):
            self._refs[block] += 1
        self._append(table, self._fresh(num_fresh, table.blocks[-1] if table.blocks else None))
        return tuple(table.blocks)

    def name_block(self, owner: str, index: int, name: bytes, parent: bytes) -> None:
        """Say that the owner's ``index``-th block holds its final content, in order: 0, 1, 2, …

        A name that another block holds leaves this one nameless; the other then stays as long as this owner does, so
        that the blocks after it can be named. Naming a block again with its own name changes nothing.

        Args:
            parent: name of the block before it, the namespace root for the first.

        Raises:
            ValueError: out of order, another name than before, or a block that is still reserved.
        """
        if not self.has_prefix_cache:
            return
        table = self._table(owner)
        if not table.may_name(index, name, parent):
            return
        above = table.holders[-1] if index else ROOT
        holder = self._tree.find(name)
        if holder is None:
            holder = table.blocks[index]
            self._tree.add(holder, name, parent, above)
        elif self._tree.parent(holder) != above:
            raise ValueError(f"block {index} of {owner!r} has a name that follows another block already")
        else:
            self._ref(holder)
        table.name(name, holder)

    def block_ids(self, owner: str) -> tuple[int, ...]:
        return tuple(self._table(owner).blocks)

    def release(self, owner: str, *, quarantine: bool = False) -> None:
        """Drop all that the owner refers to. Named blocks that nobody else uses stay as cached, nameless ones are free.

        With ``quarantine`` none of the owner's blocks is given out as fresh before `unquarantine`: those that nobody
        else uses lose their names now, and those that others use when the last of them lets go.

        Raises:
            KeyError: the owner holds nothing.
        """
        table = self._table(owner)
        self.activate(owner)
        del self._tables[owner]
        if quarantine:
            self._quarantine.add(owner, table.blocks)
        self._stamp += 1
        loose = [block for block in (*reversed(table.blocks), *reversed(table.pins())) if self._unref(block)]
        self._settle(loose)

    def unquarantine(self, owner: str) -> None:
        """The owner's peer is fenced: blocks that no other quarantine includes are free. Unknown owners are ignored."""
        freed = [block for block in self._quarantine.fenced(owner) if not self._refs[block]]
        self._num_quarantined -= len(freed)
        self._free.add(freed)

    def take_events(self) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """What became resident as (name, parent), parents first, and which names no longer are, since the last call.

        What came and went in between, or went and came, appears in neither; so the order of the two does not matter.
        """
        return self._tree.take_events()

    def counts(self) -> PoolCounts:
        free, cached = len(self._free), self._num_cached
        reserved, quarantined = self._num_reserved, self._num_quarantined
        used = self.num_blocks - free - cached - reserved - quarantined
        return PoolCounts(self.num_blocks, free, used, cached, reserved, quarantined)

    def check(self) -> None:
        """Recount all from the owners' tables; raises AssertionError. O(num_blocks), for idle times and tests."""
        refs = [0] * self.num_blocks
        for table in self._tables.values():
            for block in (*table.blocks, *table.pins()):
                refs[block] += 1
            for name, holder in zip(table.names, table.holders, strict=True):
                assert self._tree.find(name) == holder, f"block {holder} lost a name that an owner rests on"
        assert refs == self._refs, "reference counts differ from the owners' tables"
        free = self._free.ids()
        assert len(free) == len(self._free), "free runs overlap"
        cached = quarantined = 0
        for block in range(self.num_blocks):
            named, idle = self._tree.name(block) is not None, self._tree.is_idle(block)
            waits = block in self._quarantine and not refs[block]
            assert idle == (named and not refs[block]), f"block {block} is idle and used, or neither"
            assert not (named and waits), f"quarantined block {block} has a name"
            assert (block in free) == (not named and not refs[block] and not waits), f"block {block} is lost"
            cached += idle
            quarantined += waits
        reserved = [block for table in self._tables.values() for block in table.reserved]
        assert all(refs[block] == 1 and self._tree.name(block) is None for block in reserved), (
            "a reserved block is shared"
        )
        counted = (self._num_cached, self._num_quarantined, self._num_reserved)
        assert counted == (cached, quarantined, len(reserved)), f"counted {counted} cached, quarantined, reserved"
        assert self.counts().used == len({b for b in range(self.num_blocks) if refs[b]} - set(reserved))
        self._tree.check()
        self._quarantine.check()

    def _table(self, owner: str) -> BlockTable:
        if owner not in self._tables:
            raise KeyError(f"{owner!r} holds no blocks")
        return self._tables[owner]

    def _hits(self, num_blocks: int, names: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for name in names[: min(self._tree.depth(names), num_blocks)]:
            block = self._tree.find(name)
            if block is None or self._tree.parent(block) != (found[-1] if found else ROOT):
                break  # these names are no chain
            found.append(block)
        return found

    def _missing(self, num_blocks: int, hits: Sequence[int]) -> int:
        """How many blocks there are too few; every cached block can be evicted, but for the hits themselves."""
        idle_hits = sum(self._tree.is_idle(block) for block in hits)
        return num_blocks - len(hits) - len(self._free) - self._num_cached + idle_hits

    def _refuse_if_short(self, missing: int, need: int) -> None:
        if missing > 0:
            counts = self.counts()
            raise OutOfBlocks(
                f"{need} KV blocks are needed, {missing} too many: {counts.free} of {counts.total} are free and "
                f"{counts.cached} cached (engine.num_blocks)"
            )

    def _fresh(self, num_blocks: int, after: int | None) -> list[int]:
        spare = min(3 * num_blocks + 256, self._num_cached // 8)  # what may be evicted beyond the need
        while self._num_cached and not self._free.fits(num_blocks, MAX_RUNS):
            if (limit := num_blocks + spare - len(self._free)) <= 0:
                break
            self._evict(limit)
        blocks = self._free.take(num_blocks, after)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _evict(self, num_blocks: int) -> None:
        """Free at least one block and at most ``num_blocks``, of the run that has been idle longest, leaf first."""
        evicted = []
        for block in self._tree.oldest_run():
            self._tree.forget(block)
            evicted.append(block)
            if len(evicted) >= num_blocks:
                break
        assert evicted, "cached blocks without a leaf"
        self._num_cached -= len(evicted)
        self._free.add(evicted)

    def _append(self, table: BlockTable, fresh: Sequence[int]) -> None:
        table.extend(fresh)
        if table.is_reserved:
            self._num_reserved += len(fresh)

    def _ref(self, block: int) -> None:
        if self._tree.is_idle(block):
            self._tree.hold(block)
            self._num_cached -= 1
        self._refs[block] += 1

    def _unref(self, block: int) -> bool:
        self._refs[block] -= 1
        return not self._refs[block]

    def _settle(self, loose: Sequence[int]) -> None:
        """Place blocks that nobody refers to any more, children before parents."""
        held = [block for block in loose if block in self._quarantine]
        for block in loose:
            if self._tree.name(block) is not None:
                self._tree.idle(block, self._stamp)
                self._num_cached += 1
        freed = [block for block in loose if self._tree.name(block) is None and block not in self._quarantine]
        for block in held:
            if self._tree.name(block) is not None:
                freed += self._forget_below(block)
        self._num_quarantined += len(held)
        self._free.add(freed)

    def _forget_below(self, block: int) -> list[int]:
        """Take the names from a block and what is cached behind it; returns those of them that are now free."""
        lost = self._tree.subtree(block)
        for below in lost:
            self._tree.forget(below)
        self._num_cached -= len(lost)
        return [below for below in lost if below not in self._quarantine]
