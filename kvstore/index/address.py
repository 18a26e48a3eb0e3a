"""Where the store is and how to get in: one server, a primary that sentinels know, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from kvstore.errors import ConfigError

TOPOLOGIES = ("standalone", "sentinel", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """``url``: redis://, rediss:// (TLS) or unix://, with several hosts where they are sentinels or cluster nodes.

    ``username`` and ``password`` weigh more than those in ``url``. The passwords are not in the `repr`.
    """

    url: str = field(repr=False)
    topology: str = "standalone"
    service: str = "mymaster"
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {self.topology!r}")

    @property
    def is_cluster(self) -> bool:
        return self.topology == "cluster"

    @property
    def shown(self) -> str:
        """For people: scheme and hosts, without any credentials."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
