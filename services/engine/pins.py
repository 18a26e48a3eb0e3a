"""Blocks of the prefix cache that are held for a peer which reads them: no sequence uses them, nobody evicts them."""

from __future__ import annotations

import logging

from kvstore.errors import KVError
from kvstore.pool import BlockPool
from services.engine.messages import PinBlocks, Pinned

log = logging.getLogger("pdray.engine")


class Pins:
    """Owners of pinned blocks, by the sequence id that PinBlocks named."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: set[str] = set()

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, message: PinBlocks) -> Pinned:
        """Hold what is here of the names. A second pin under one id holds nothing."""
        if message.seq_id in self._held:
            log.error("%s has pinned blocks already", message.seq_id)
            return Pinned(seq_id=message.seq_id, block_ids=())
        return Pinned(seq_id=message.seq_id, block_ids=self._hold(message))

    def release(self, seq_id: str) -> bool:
        """Let go of what is held under this id; False where nothing is."""
        if seq_id not in self._held:
            return False
        self._held.discard(seq_id)
        self._pool.release(seq_id)
        return True

    def _hold(self, message: PinBlocks) -> tuple[int, ...]:
        num_blocks = self._pool.lookup(message.names)
        if not num_blocks:
            return ()
        try:
            held = self._pool.acquire(message.seq_id, num_blocks, message.names[:num_blocks])
        except KVError as exc:
            log.error("nothing is pinned for %s: %s", message.seq_id, exc)
            return ()
        if held.cached_blocks < num_blocks:  # these names are no chain, and what is fresh holds nothing
            self._pool.release(message.seq_id)
            return ()
        self._held.add(message.seq_id)
        return held.block_ids
