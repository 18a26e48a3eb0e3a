"""The shape of a worker's KV memory, from the model's card and the engine's settings; no torch.

The service process needs it before the engine child exists, since it makes the memory that the child maps.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry, KVGroup
from services.config import DTYPES, EngineConfig
from services.protocol.model_card import ModelCard

MAX_MODEL_LEN = 8192
"""Default cap where the configuration names no length."""

_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def resolve_dtype(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``auto`` becomes bfloat16 where the CPU multiplies it in hardware, else float32; other names pass through."""
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype must be one of {DTYPES}, got {dtype!r}")
    if dtype != "auto":
        return dtype
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "float32"
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return "bfloat16" if flags & _BF16_FLAGS else "float32"


def resolve_max_model_len(card: ModelCard, requested: int) -> int:
    """Tokens of prompt and answer together.

    Raises:
        ConfigError: more was asked for than the model was made for.
    """
    if requested > card.max_model_len:
        raise ConfigError(f"model.max_model_len is {requested}, but {card.name} was made for {card.max_model_len}")
    return requested or min(card.max_model_len, MAX_MODEL_LEN)


def kv_geometry(card: ModelCard, engine: EngineConfig, dtype: str) -> KVGeometry:
    """One group of full attention; as many blocks as configured, or as ``kv_memory_bytes`` holds.

    Args:
        dtype: resolved, see `resolve_dtype`.
    Raises:
        ConfigError: the memory holds not even one block.
    """
    group = KVGroup(
        num_layers=card.num_layers,
        num_kv_heads=card.num_kv_heads,
        head_dim=card.head_dim,
        block_size=engine.block_size,
        dtype=dtype,
    )
    block_bytes = group.block_bytes * group.num_layers
    num_blocks = engine.num_blocks or group.blocks_within(engine.kv_memory_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"engine.kv_memory_bytes is {engine.kv_memory_bytes}, but one block takes {block_bytes} bytes"
        )
    return KVGeometry(groups=(group,), num_blocks=(num_blocks,))
