"""LMCache as a tier: its engine in this process, with whatever it keeps chunks in (memory, disk, a remote store).

    save ─► thread: lookup, store      whole chunks only: of 500 tokens in chunks of 64, 448 are kept
    load ─► thread: retrieve ─► chunk layout [2, layers, tokens, kv_heads · head_dim] ─► our blocks

LMCache names a chunk by a 64-bit hash of its tokens, which knows no tenant, and which Python's own ``hash`` makes where
vLLM is not there. Here a chunk has the 128-bit name of its last block instead, so its key holds salt, model, tokenizer,
dtype and layout, and no two prompts share one by accident.

LMCache may wait for a disk or a network, so one thread does all that calls it. It pins nothing for a reserve: what it
evicts before the thread reads it is reported as an error, and computed. Its usage reports are refused unless the
environment has turned them off.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

try:
    from lmcache.usage_telemetry.identity import is_usage_tracking_enabled
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import TokenDatabase
except ImportError as exc:
    raise ImportError(
        f"LMCache is not there ({exc}); make setup installs it, and pip install pdray[lmcache] where CUDA is"
    ) from None

import numpy as np
import torch

from kvstore.errors import ConfigError
from kvstore.geometry import ITEMSIZE
from kvstore.tensors import KVMemory
from kvstore.tier.base import Prefix, Save
from kvstore.tier.registry import TierOptions

log = logging.getLogger("pdray.tier")

_POLL_S = 0.002
_INTEGERS = {2: torch.int16, 4: torch.int32}  # numpy has no bfloat16; copies need none


class _Names(TokenDatabase):  # type: ignore[misc]
    """Keys of chunks from block names; LMCache asks it about the prefix that the thread has set before."""

    def __init__(self, metadata: Any, chunk_tokens: int, block_size: int) -> None:
        self.metadata = metadata
        self.save_only_first_rank = False
        self.names: Sequence[bytes] = ()
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size

    def process_tokens(
        self, tokens: Any = None, hashes: Any = None, offsets: Any = None, mask: Any = None, *others: Any, **more: Any
    ) -> Iterator[tuple[int, int, Any]]:
        """(first token, one past the last, key) of each whole chunk that the mask does not leave out."""
        start = 0 if mask is None else int((~mask).sum())
        for first in range(start, len(tokens) - self._chunk_tokens + 1, self._chunk_tokens):
            stop = first + self._chunk_tokens
            name = self.names[stop // self._block_size - 1]
            yield first, stop, self._make_key_by_hash(int.from_bytes(name, "big"), None)


class _Pages(GPUConnectorInterface):  # type: ignore[misc]
    """Copies between our blocks and LMCache's chunks, on the thread that calls LMCache."""

    def __init__(self, memory: KVMemory) -> None:
        group = memory.geometry.groups[0]
        self._shape = (2, group.num_layers, -1, group.block_size, group.num_kv_heads, group.head_dim)
        self._integers = _INTEGERS[ITEMSIZE[group.dtype]]
        layers = [memory.layer(0, i).view(self._integers).numpy() for i in range(group.num_layers)]
        self._layers = [layer.transpose(0, 1, 3, 2, 4) for layer in layers]  # [blocks, 2, block_size, heads, head_dim]
        self._block_size = group.block_size

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **kwargs)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for nth, block, view in self._blocks(memory_obj, start, kwargs["blocks"]):
            for layer, pages in enumerate(self._layers):
                view[:, layer, nth] = pages[block]

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        stop: threading.Event = kwargs["stop"]
        for nth, block, view in self._blocks(memory_obj, start, kwargs["blocks"]):
            if stop.is_set():
                return
            for layer, pages in enumerate(self._layers):
                pages[block] = view[:, layer, nth]

    def get_shape(self, num_tokens: int) -> torch.Size:
        group = self._shape
        return torch.Size([2, group[1], num_tokens, group[4] * group[5]])

    def _blocks(self, chunk: Any, start: int, blocks: Mapping[int, int]) -> Iterator[tuple[int, int, Any]]:
        """(index in the chunk, our block, the chunk as [2, layers, its blocks, …]) of those blocks that are meant."""
        view: Any = chunk.tensor.view(self._integers).numpy().reshape(self._shape)
        for nth in range(view.shape[2]):
            block = blocks.get(start // self._block_size + nth)
            if block is not None:
                yield nth, block, view


@dataclass(slots=True)
class _Load:
    prefix: Prefix
    first: int
    stop: threading.Event
    block_ids: tuple[int, ...] = ()
    done: Future[int] | None = None  # blocks that were filled, from the first on


class LMCacheTier:
    """`kvstore.tier.base.Connector` over an LMCache engine in this process."""

    def __init__(self, memory: KVMemory, options: TierOptions) -> None:
        """Starts LMCache's threads, and takes its memory.

        Args:
            options: ``chunk_tokens`` a multiple of the block size; ``extra``: fields of LMCacheEngineConfig.
        Raises:
            ConfigError: a field is unknown, or LMCache would report its use to others.
        """
        if is_usage_tracking_enabled():
            raise ConfigError("tier.connector lmcache: its usage reports are on; set LMCACHE_TRACK_USAGE=false")
        group = memory.geometry.groups[0]
        chunk = options.chunk_tokens
        self.chunk_blocks = chunk // group.block_size
        self._block_size = group.block_size
        self._num_layers = group.num_layers
        metadata = LMCacheMetadata(
            model_name=options.model or "pdray",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=getattr(torch, group.dtype),
            kv_shape=(group.num_layers, 2, chunk, group.num_kv_heads, group.head_dim),
            chunk_size=chunk,
        )
        self._names = _Names(metadata, chunk, group.block_size)
        self._engine = LMCacheEngine(
            _config(options), metadata, self._names, _Pages(memory), lambda _tensor, _rank: None, lambda x, _rank: x
        )
        self._engine.post_init()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmcache")
        self._lookups: dict[str, Future[int]] = {}
        self._loads: dict[str, _Load] = {}
        self._unsafe: dict[str, Future[int]] = {}
        self._saves: dict[int, Future[int]] = {}
        self._stored = self._loaded = self._failed = 0

    # -- loads -------------------------------------------------------------------------------------------------------

    def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
        asked = self._lookups.get(seq_id)
        if asked is None:
            asked = self._lookups[seq_id] = self._thread.submit(self._find, prefix, len(prefix.names))
        return self._result(asked) if asked.done() else None

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        asked = self._lookups.get(seq_id)
        known = self._result(asked) if asked is not None and asked.done() else 0
        found = min(count, known - first)
        if found <= 0:
            return 0
        self._loads[seq_id] = _Load(prefix, first, threading.Event())
        return found

    def start_load(self, seq_id: str, block_ids: Sequence[int]) -> None:
        load = self._loads[seq_id]
        load.block_ids = tuple(block_ids)
        load.done = self._thread.submit(self._retrieve, load)

    def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
        load = self._loads.get(seq_id)
        return load is None or (load.done is not None and load.done.done())

    def errors(self, seq_id: str) -> frozenset[int]:
        load = self._loads.get(seq_id)
        if load is None or load.done is None:
            return frozenset()
        return frozenset(load.block_ids[self._result(load.done) :])

    def finish(self, seq_id: str) -> bool:
        asked = self._lookups.pop(seq_id, None)
        if asked is not None:
            asked.cancel()
        load = self._loads.pop(seq_id, None)
        if load is None or load.done is None:
            return seq_id not in self._unsafe
        load.stop.set()
        if load.done.done() or load.done.cancel():
            return True
        self._unsafe[seq_id] = load.done
        return False

    def abort(self, seq_id: str) -> bool:
        return self.finish(seq_id)

    def fenced(self) -> Sequence[str]:
        safe = [seq_id for seq_id, done in self._unsafe.items() if done.done()]
        for seq_id in safe:
            del self._unsafe[seq_id]
        return safe

    # -- saves -------------------------------------------------------------------------------------------------------

    def save_layer(self, save: Save, layer: int) -> None:
        if layer == self._num_layers - 1:  # a chunk holds all layers
            self._saves[save.number] = self._thread.submit(self._store, save)

    def saved(self) -> Sequence[int]:
        done = [number for number, stored in self._saves.items() if stored.done()]
        for number in done:
            self._result(self._saves.pop(number))
        return done

    # -- both --------------------------------------------------------------------------------------------------------

    def poll(self) -> float | None:
        waits = self._unsafe or self._saves or any(load.done is not None for load in self._loads.values())
        return _POLL_S if waits else None

    def stats(self) -> dict[str, int]:
        return {"blocks_stored": self._stored, "blocks_loaded": self._loaded, "calls_failed": self._failed}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        manager = self._engine.storage_manager
        self._engine.close()
        if not manager.loop.is_running():
            manager.loop.close()  # LMCache stops it, and leaves its sockets open

    def _result(self, done: Future[int]) -> int:
        """What the thread has found or moved, in blocks; a failure is logged, and means none."""
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._failed += 1
            log.error("LMCache failed: %s: %s", type(error).__name__, error)
        return 0 if error is not None or done.cancelled() else done.result()

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _find(self, prefix: Prefix, num_blocks: int) -> int:
        """Leading blocks that LMCache has."""
        self._names.names = prefix.names
        tokens = list(itertools.islice(prefix.token_ids, num_blocks * self._block_size))
        return int(self._engine.lookup(tokens)) // self._block_size

    def _retrieve(self, load: _Load) -> int:
        first, stop = load.first, load.first + len(load.block_ids)
        start = first // self.chunk_blocks * self.chunk_blocks  # chunks are read whole, and written in part
        end = -(-stop // self.chunk_blocks) * self.chunk_blocks
        tokens, mask = self._asked(load.prefix, start, min(end, len(load.prefix.names)))
        blocks = dict(zip(range(first, stop), load.block_ids, strict=True))
        found = self._engine.retrieve(tokens, mask, blocks=blocks, stop=load.stop)
        num_blocks = max(0, min(stop, start + int(found.sum()) // self._block_size) - first)
        self._loaded += num_blocks
        return num_blocks

    def _store(self, save: Save) -> int:
        stop = save.first + len(save.block_ids)
        here = self._find(save.prefix, stop)
        if here < save.first or here >= stop:
            return 0  # a chunk before it is gone, so nobody would find this one; or all of it is kept already
        tokens, mask = self._asked(save.prefix, here, stop)
        blocks = dict(zip(range(save.first, stop), save.block_ids, strict=True))
        self._engine.store(tokens, mask=mask, blocks=blocks)
        self._stored += stop - here
        return stop - here

    def _asked(self, prefix: Prefix, first: int, stop: int) -> tuple[list[int], torch.Tensor]:
        """The tokens up to block ``stop``, and a mask that leaves out those before block ``first``."""
        self._names.names = prefix.names
        tokens = list(itertools.islice(prefix.token_ids, stop * self._block_size))
        mask = torch.from_numpy(np.arange(len(tokens)) >= first * self._block_size)
        return tokens, mask


def _config(options: TierOptions) -> Any:
    """LMCache's own configuration; its memory is ``host_bytes`` unless ``extra`` says otherwise."""
    values: dict[str, Any] = {
        "chunk_size": options.chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": options.host_bytes / (1 << 30),
        **options.extra,
    }
    known = LMCacheEngineConfig.from_defaults()
    unknown = [name for name in values if not hasattr(known, name)]
    if unknown:
        raise ConfigError(f"tier.options: LMCache has no setting {', '.join(unknown)}")
    return LMCacheEngineConfig.from_defaults(**values)
