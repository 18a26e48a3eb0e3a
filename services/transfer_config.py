"""Settings of the hand-off, section ``transfer``. Read by `services.config`."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine_config import require

ON_KV_FAILURE = ("ladder", "recompute", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """The hand-off between prefill and decode."""

    transport: str = "auto"
    """``nvlink``, ``rdma``, ``mooncake`` (its TCP wire), ``tcp``, ``local`` or ``module:Class``; ``auto``: mooncake
    where it can be guarded, else tcp."""
    allow_fallback: bool = False
    """Where the transport that was named cannot run on a machine, go on with the next slower one, and say so."""
    protocol: str = "tcp"
    """Mooncake's wire: ``tcp``, or ``rdma``, which means transport ``rdma``."""
    device: str = ""
    """RDMA devices for Mooncake, comma separated; empty: its own discovery. A ``module:Class`` transport may read
    options of its own here."""
    mooncake_env: tuple[str, ...] = ()
    """MC_NAME=value, …: settings of Mooncake's own, such as MC_CUSTOM_TOPO_JSON, MC_GID_INDEX or MC_IB_PORT."""
    digests: bool = True
    """Verify each written extent with xxh3-64."""
    layerwise: bool = True
    """Push each layer when it is computed; off: all layers after the chunk's forward."""
    lease_ms: int = 5000
    lease_renew_ms: int = 1000
    max_outstanding: int = 512
    """Writes on the wire to one peer; the rest wait in our queue."""
    pull_ms: int = 2000
    """How long a prompt waits for KV that another worker writes; past it, it is computed."""
    fence_after_ms: int = 2000
    """An aborted write not done by then is fenced by closing the peer's channel."""
    on_kv_failure: str = "ladder"
    """What follows where KV does not arrive, or arrives damaged. ``ladder``: send it once more, hand it to another
    reader, other workers, at last one worker that computes everything; ``recompute``: other workers at once; ``fail``:
    the request ends with the error."""
    throttle_bytes_per_s: int = 0
    """Slows every write, for tests and benchmarks; 0: off."""

    def __post_init__(self) -> None:
        require(self.protocol in ("tcp", "rdma"), "transfer.protocol", f"must be tcp or rdma, got {self.protocol!r}")
        require(
            self.on_kv_failure in ON_KV_FAILURE,
            "transfer.on_kv_failure",
            f"must be one of {ON_KV_FAILURE}, got {self.on_kv_failure!r}",
        )
        for pair in self.mooncake_env:
            name, equals, value = pair.partition("=")
            require(
                name.startswith("MC_") and bool(equals and value),
                "transfer.mooncake_env",
                f"{pair!r} is no MC_NAME=value",
            )
        for name in ("lease_ms", "lease_renew_ms", "max_outstanding", "pull_ms", "fence_after_ms"):
            require(getattr(self, name) >= 1, f"transfer.{name}", f"must be at least 1, got {getattr(self, name)}")
        require(
            self.lease_renew_ms * 2 <= self.lease_ms,
            "transfer.lease_renew_ms",
            f"must be at most half of transfer.lease_ms ({self.lease_ms}), got {self.lease_renew_ms}",
        )

    @property
    def wanted(self) -> str:
        """The transport that is asked for: a setting of its own, or the wire that Mooncake should use."""
        return "rdma" if self.protocol == "rdma" and self.transport in ("auto", "mooncake") else self.transport
