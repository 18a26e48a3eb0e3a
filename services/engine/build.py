"""An engine from its configuration: the one place that wires model, memory, pool, scheduler and runner."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry
from kvstore.pool import BlockPool
from kvstore.tensors import KVMemory
from kvstore.tier.registry import TierOptions, make_connector
from kvstore.transfer.progress import ProgressSender
from services.config import EngineConfig
from services.engine.core import Engine
from services.engine.grammar import Grammars
from services.engine.intake import Limits
from services.engine.loader import load_model
from services.engine.native.fused import FusedPath
from services.engine.runner import Runner
from services.engine.scheduler import Scheduler
from services.engine.tiers import Tiers
from services.tier_config import TierConfig


def build_engine(send: Callable[[Any], None], memory_fd: int, progress_fd: int, config: dict[str, Any]) -> Engine:
    """Load the model and attach the memory; warmed up, ready for messages.

    Args:
        memory_fd: a memfd of the geometry's size; taken over.
        progress_fd: end of a SOCK_SEQPACKET pair, or -1.
        config: what `services.engine.child.child_config` wrote, parsed.
    Raises:
        ConfigError: the model is refused.
    """
    settings = EngineConfig(**config["engine"])
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    geometry = KVGeometry.from_dict(config["geometry"])
    model = load_model(
        Path(config["folder"]),
        dtype=config["dtype"],
        backend=settings.attention,
        kernels=settings.kernels,
        max_model_len=config["max_model_len"],
        trust_remote_code=config["trust_remote_code"],
    )
    gc.collect()  # a module that was only a pattern for the fused path refers to itself, and would stay for long
    if settings.batch_invariant and not model.is_batch_invariant:
        raise ConfigError(
            f"engine.batch_invariant: {model.path.name} lets neighbours change a sequence's last bits"
            + (f" ({model.note})" if model.note else "")
        )
    limits = Limits(
        num_blocks=geometry.num_blocks[0],
        block_size=geometry.groups[0].block_size,
        max_model_len=config["max_model_len"],
        vocab_size=model.card.vocab_size,
        eos_token_ids=model.card.eos_token_ids,
    )
    if isinstance(model.path, FusedPath):
        model.path.is_pinned = torch.get_num_threads() == len(os.sched_getaffinity(0))  # no other worker is here
    grammars = Grammars(model.card.tokenizer_path, limits.vocab_size, limits.eos_token_ids)
    memory = KVMemory.attach(memory_fd, geometry)
    runner = Runner.over(model, memory, limits, grammars)
    runner.warm_up()
    scheduler = Scheduler(
        BlockPool(limits.num_blocks, settings.prefix_cache == "hash", settings.eviction),
        limits,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        rules=settings,
    )
    return Engine(
        scheduler,
        runner,
        send=send,
        clock=time.monotonic,
        progress=ProgressSender(progress_fd, geometry.groups[0].num_layers) if progress_fd >= 0 else None,
        tiers=_tiers(scheduler, memory, TierConfig(**config["tier"]), model.card.model_fingerprint),
    )


def _tiers(scheduler: Scheduler, memory: KVMemory, config: TierConfig, fingerprint: str) -> Tiers:
    if config.connector == "lmcache" and config.chunk_tokens % scheduler.limits.block_size:
        raise ConfigError(
            f"tier.chunk_tokens must be a multiple of engine.block_size ({scheduler.limits.block_size}), "
            f"got {config.chunk_tokens}"
        )
    options = TierOptions(
        host_bytes=config.host_bytes, chunk_tokens=config.chunk_tokens, model=fingerprint, extra=config.extra
    )
    return Tiers(
        scheduler.roster.pool,
        memory.geometry.groups[0].num_layers,
        make_connector(config.connector, memory, options),
        name=config.connector,
        lookup_s=config.lookup_ms / 1e3,
        load_s=config.load_ms / 1e3,
    )
