"""A connector to copy from: KV blocks in a dictionary, all layers of a block as one string of bytes.

A thread does the slow part, as one would that talks to a store over a network; no verb waits for it. Serve with it:

    PYTHONPATH=docs/examples pdray serve --set tier.connector=dict_connector:DictConnector

It never evicts and never fails, which a real one does; docs/tiers.md says what to do then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.tensors import KVMemory
from kvstore.tier.base import Prefix, Save
from kvstore.tier.registry import TierOptions


class DictConnector:
    """`kvstore.tier.base.Connector`, in 80 lines."""

    chunk_blocks = 1

    def __init__(self, memory: KVMemory, options: TierOptions) -> None:
        self._memory = memory
        self._num_layers = memory.geometry.groups[0].num_layers
        self._kept: dict[bytes, bytes] = {}  # by name; names say whose they are, so one dictionary serves all
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._reserved: dict[str, list[bytes]] = {}  # contents: what is referred to cannot go away
        self._loads: dict[str, tuple[tuple[int, ...], Future[None], threading.Event]] = {}
        self._unsafe: dict[str, Future[None]] = {}
        self._saves: dict[int, Future[None]] = {}

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
        return next((i for i, name in enumerate(prefix.names) if name not in self._kept), len(prefix.names))

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        stop = min(first + count, self.lookup(seq_id, prefix) or 0)
        contents = [self._kept[name] for name in prefix.names[first:stop]]
        self._reserved[seq_id] = contents
        return len(contents)

    def start_load(self, seq_id: str, block_ids: Sequence[int]) -> None:
        contents, stop = self._reserved.pop(seq_id), threading.Event()
        done = self._thread.submit(self._load, contents, tuple(block_ids), stop)
        self._loads[seq_id] = tuple(block_ids), done, stop

    def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
        return seq_id not in self._loads or self._loads[seq_id][1].done()

    def errors(self, seq_id: str) -> frozenset[int]:
        if seq_id not in self._loads:
            return frozenset()
        block_ids, done, _ = self._loads[seq_id]
        return frozenset(block_ids if done.exception() else ())

    def finish(self, seq_id: str) -> bool:
        return self.abort(seq_id)

    def abort(self, seq_id: str) -> bool:
        self._reserved.pop(seq_id, None)
        if seq_id not in self._loads:
            return seq_id not in self._unsafe
        _, done, stop = self._loads.pop(seq_id)
        stop.set()
        if done.done() or done.cancel():
            return True
        self._unsafe[seq_id] = done  # the thread may still write
        return False

    def fenced(self) -> Sequence[str]:
        safe = [seq_id for seq_id, done in self._unsafe.items() if done.done()]
        for seq_id in safe:
            del self._unsafe[seq_id]
        return safe

    def _load(self, contents: list[bytes], block_ids: tuple[int, ...], stop: threading.Event) -> None:
        for content, block in zip(contents, block_ids, strict=True):
            if stop.is_set():
                return
            size = len(content) // self._num_layers
            for layer in range(self._num_layers):
                self._memory.block(0, layer, block)[:] = content[layer * size : (layer + 1) * size]

    # -- saves ---------------------------------------------------------------------------------------------------------

    def save_layer(self, save: Save, layer: int) -> None:
        if layer == self._num_layers - 1:  # all layers of a block are kept together, so wait for the last one
            names = save.prefix.names[save.first : save.first + len(save.block_ids)]
            self._saves[save.number] = self._thread.submit(self._save, list(names), tuple(save.block_ids))

    def saved(self) -> Sequence[int]:
        done = [number for number, save in self._saves.items() if save.done()]
        for number in done:
            del self._saves[number]
        return done

    def _save(self, names: list[bytes], block_ids: tuple[int, ...]) -> None:
        for name, block in zip(names, block_ids, strict=True):
            layers = [bytes(self._memory.block(0, layer, block)) for layer in range(self._num_layers)]
            self._kept[name] = b"".join(layers)

    # -- both ----------------------------------------------------------------------------------------------------------

    def poll(self) -> float | None:
        return 0.002 if self._loads or self._unsafe or self._saves else None

    def stats(self) -> dict[str, int]:
        return {"blocks_kept": len(self._kept)}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
