"""The scheduler's settings, as far as they decide who is computed when."""

from __future__ import annotations

from dataclasses import dataclass, fields

from services.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Fields of `EngineConfig` under their own names; what they mean is told there."""

    policy: str = "priority"
    batching: str = "continuous"
    ageing_bound_tokens: int = 16384
    lpm_queue_bound: int = 128
    long_prefill_threshold_tokens: int = 0
    mixed_batches: bool = True
    prefill_interval_steps: int = 1
    admission_watermark: float = 0.0
    reserve_output: float = 0.0

    @classmethod
    def of(cls, config: EngineConfig) -> Rules:
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


DEFAULT_RULES = Rules()
