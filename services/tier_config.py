"""Settings of the tier: where an engine keeps KV beside its own blocks. Part of `services.config`."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine_config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Where each engine keeps copies of named blocks, and finds them again; see docs/tiers.md."""

    connector: str = "off"
    """``off``, ``host`` (this machine's memory), ``lmcache``, a name that a package registers, or ``module:Class``."""
    host_bytes: int = 1 << 30
    """Memory of each worker's tier; ``lmcache``: of its own memory for KV."""
    chunk_tokens: int = 256
    """``lmcache``: tokens of a chunk, a multiple of ``engine.block_size``; only whole chunks are kept."""
    lookup_ms: int = 100
    """How long a request may wait for a look-up; after it, it is computed."""
    load_ms: int = 2000
    """How long a load may take; after it, the blocks are computed."""
    options: tuple[str, ...] = ()
    """``name=value`` for the connector itself; ``lmcache``: fields of its configuration."""

    def __post_init__(self) -> None:
        require(bool(self.connector), "tier.connector", "must not be empty; off is the way to have none")
        for name in ("host_bytes", "chunk_tokens", "lookup_ms", "load_ms"):
            require(getattr(self, name) >= 1, f"tier.{name}", f"must be at least 1, got {getattr(self, name)}")
        for option in self.options:
            require("=" in option, "tier.options", f"must be name=value, got {option!r}")

    @property
    def extra(self) -> dict[str, str]:
        """The connector's own settings by name."""
        pairs = (option.partition("=") for option in self.options)
        return {name.strip(): value.strip() for name, _, value in pairs}


DEFAULT_TIER = TierConfig()
