"""Settings of one worker's engine: memory, what a step may hold, and who goes first. Part of `services.config`."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError

POLICIES = ("fcfs", "priority", "lpm", "dfs-weight", "lof", "hrrn")
BATCHING = ("continuous", "static", "request")
PREFIX_CACHES = ("hash", "off")
KERNELS = ("auto", "amx", "avx512_bf16", "avx512", "avx2", "off")
EVICTIONS = ("lru", "lfu")


def require(ok: bool, path: str, message: str) -> None:
    """Raise ConfigError, starting with the dotted path, unless the value is fine."""
    if not ok:
        raise ConfigError(f"{path} {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine of one worker."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int = 0
    """KV blocks of a worker; 0: from ``kv_memory_bytes``."""
    kv_memory_bytes: int = 512 << 20
    """Memory for KV where ``num_blocks`` is 0."""
    prefix_cache: str = "hash"
    """``hash``: full blocks are kept under the digest of all tokens up to them; ``off``: nothing is kept."""
    eviction: str = "lru"
    """Which cached blocks go first: ``lru``, idle longest; ``lfu``, found least often, then idle longest."""
    max_num_batched_tokens: int = 256
    """Token budget of a step; also the longest prefill chunk."""
    max_num_seqs: int = 64
    """Sequences that may run at once."""
    batching: str = "continuous"
    """``continuous``; for comparison ``static`` (nobody enters a batch before all of it ended), ``request`` (one)."""
    policy: str = "priority"
    """Who goes first: ``fcfs``, ``priority``, ``lpm``, ``dfs-weight``, ``lof`` or ``hrrn``; see docs/scheduling.md."""
    ageing_bound_tokens: int = 16384
    """Who has waited while so many tokens were computed goes before all others, whatever the policy."""
    lpm_queue_bound: int = 128
    """With more waiting, ``lpm`` takes them as they came."""
    long_prefill_threshold_tokens: int = 0
    """Most tokens of one prompt in a step while other sequences are there; 0: no limit but the budget."""
    mixed_batches: bool = True
    """Off: a step computes either decodes or prompts, in turn where there are both."""
    prefill_interval_steps: int = 1
    """While sequences decode, prompts are computed in every so many steps."""
    admission_watermark: float = 0.0
    """Share of the blocks that starting a sequence leaves free, unless it is the only one."""
    reserve_output: float = 0.0
    """Starting a sequence sets blocks aside for its output: so many times the learned share of max_tokens; 0: off."""
    num_threads: int = 0
    """torch threads of a worker; 0: the machine's cores shared out among its workers."""
    attention: str = "auto"
    """Attention backend: ``native``, ``reference`` (plain torch, the oracle), or ``auto``: the fastest that works."""
    kernels: str = "auto"
    """Native kernels: ``auto``, ``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``off``; compiled at first start."""
    batch_invariant: bool = False
    """Refuse to start unless a sequence's tokens never depend on neighbours, chunks or cache hits, in bfloat16 too."""
    steps_kept: int = 256
    """Steps shown at /debug/steps."""

    def __post_init__(self) -> None:
        for name in (
            "block_size", "max_num_batched_tokens", "max_num_seqs", "ageing_bound_tokens", "prefill_interval_steps",
            "steps_kept",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, f"engine.{name}", f"must be at least 1, got {getattr(self, name)}")
        for name in ("num_blocks", "lpm_queue_bound", "long_prefill_threshold_tokens", "reserve_output"):
            require(getattr(self, name) >= 0, f"engine.{name}", f"must not be negative, got {getattr(self, name)}")
        for name, known in (
            ("policy", POLICIES), ("batching", BATCHING), ("prefix_cache", PREFIX_CACHES), ("eviction", EVICTIONS),
            ("kernels", KERNELS),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value in known, f"engine.{name}", f"must be one of {', '.join(known)}, got {value!r}")
        require(self.reserve_output <= 100, "engine.reserve_output", f"must be at most 100, got {self.reserve_output}")
        require(
            0 <= self.admission_watermark < 1,
            "engine.admission_watermark",
            f"must be at least 0 and below 1, got {self.admission_watermark}",
        )


DEFAULT_ENGINE = EngineConfig()
