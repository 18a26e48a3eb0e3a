"""Settings of the metadata store. Part of `services.config`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.index.address import TOPOLOGIES, StoreAddress
from services.engine_config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """The metadata store. Hints only: nothing fails when it is down. See docs/redis.md."""

    url: str = "embedded"
    """``embedded`` (a Valkey that `pdray serve` starts), ``none``, or redis://…, rediss://… (TLS), unix://…; several
    hosts as redis://host:port,host:port for ``sentinel`` and ``cluster``."""
    is_embedded: bool = False
    """``url`` is the server that this application itself started; set by the start, shown at /v1/cluster."""
    topology: str = "standalone"
    """``standalone``, ``sentinel`` (``url`` names the sentinels) or ``cluster`` (``url`` names some nodes)."""
    service: str = "mymaster"
    """``sentinel``: the primary's name there."""
    username: str = ""
    """ACL user; weighs more than the one in ``url``. Empty: the default user."""
    password: str = field(default="", repr=False)
    """Of that user; weighs more than the one in ``url``."""
    sentinel_username: str = ""
    """``sentinel``: ACL user of the sentinels themselves."""
    sentinel_password: str = field(default="", repr=False)
    """Of that user. Empty: the sentinels ask for none."""
    ca_file: str = ""
    """Certificates that sign the servers' own, for rediss://. Empty: the system's."""
    cert_file: str = ""
    """This side's certificate, where the servers ask for one."""
    key_file: str = ""
    """Its key."""
    namespace: str = "default"
    ttl_s: float = 15.0
    """Life of a worker's keys after its last heartbeat."""
    heartbeat_s: float = 3.0
    max_blocks: int = 16_000_000
    """Block names that a router keeps of all workers, about twelve bytes each; beyond, it forgets those of the worker
    that it chose longest ago."""

    def __post_init__(self) -> None:
        require(bool(self.namespace) and ":" not in self.namespace, "redis.namespace", "must not be empty or hold ':'")
        require(
            0 < self.heartbeat_s * 2 <= self.ttl_s,
            "redis.heartbeat_s",
            f"must be at most half of redis.ttl_s ({self.ttl_s})",
        )
        require(self.max_blocks >= 1, "redis.max_blocks", f"must be at least 1, got {self.max_blocks}")
        require(
            self.topology in TOPOLOGIES,
            "redis.topology",
            f"must be one of {', '.join(TOPOLOGIES)}, got {self.topology!r}",
        )
        require(bool(self.service), "redis.service", "must not be empty")
        require(bool(self.cert_file) == bool(self.key_file), "redis.key_file", "goes together with redis.cert_file")
        is_tls = self.url.startswith("rediss://")
        for name in ("ca_file", "cert_file"):
            require(is_tls or not getattr(self, name), f"redis.{name}", "needs redis.url to begin with rediss://")
        if self.topology != "standalone":
            require("://" in self.url, "redis.url", f"must name the hosts of redis.topology={self.topology}")

    @property
    def address(self) -> StoreAddress:
        """For the clients of `kvstore.index`. Raises ConfigError, or ValueError, for a ``url`` that is no address."""
        return StoreAddress(
            url=self.url,
            topology=self.topology,
            service=self.service,
            username=self.username,
            password=self.password,
            sentinel_username=self.sentinel_username,
            sentinel_password=self.sentinel_password,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )

    @property
    def kind(self) -> str:
        """``none``, ``embedded``, or the topology."""
        if self.url == "none":
            return "none"
        return "embedded" if self.is_embedded or self.url == "embedded" else self.topology
