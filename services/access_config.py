"""Settings of the front door: who may call (``access``), over which wire (``tls``), and how much (``limits``).

Part of `services.config`. docs/access.md has the table of limits, made from the docstrings here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from services.engine_config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """API keys, and what a tenant may take; see docs/access.md."""

    keys_file: str = ""
    """YAML or JSON with API keys, in clear nowhere; once given, every route and RPC but health wants a key. Empty:
    everybody who reaches the port may do everything."""
    reload_s: float = 2.0
    """How often the file is looked at; a changed one counts from then on, a broken one is reported and changes
    nothing."""
    requests_per_minute: int = 0
    """Of each tenant that has no limit of its own in the file, on each router; 0: no limit."""
    tokens_per_minute: int = 0
    """Likewise: prompt and answer tokens."""
    concurrency: int = 0
    """Likewise: requests at once."""
    hosts: tuple[str, ...] = ()
    """Names that a router on loopback without keys is asked by, beside localhost and addresses: those of a proxy before
    it. A page in a browser whose name was made to point here is turned away so; ``*`` lets every name in."""
    audit_file: str = ""
    """JSON lines about what administrators did, beside the log; empty: the log alone (logger ``pdray.audit``)."""

    def __post_init__(self) -> None:
        require(self.reload_s > 0, "access.reload_s", f"must be positive, got {self.reload_s}")
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency"):
            require(getattr(self, name) >= 0, f"access.{name}", f"must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Encryption of the router's own HTTP and gRPC ports; files are PEM."""

    cert_file: str = ""
    """The server's certificate, with the chain up to its CA. Empty: plain HTTP and gRPC."""
    key_file: str = ""
    """Its private key, without a passphrase."""
    client_ca_file: str = ""
    """CA of client certificates; once given, a client without one is turned away."""

    def __post_init__(self) -> None:
        require(
            bool(self.cert_file) == bool(self.key_file),
            "tls.key_file",
            "and tls.cert_file belong together: give both, or none",
        )
        require(
            not self.client_ca_file or bool(self.cert_file),
            "tls.client_ca_file",
            "needs tls.cert_file and tls.key_file",
        )

    @property
    def is_on(self) -> bool:
        return bool(self.cert_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one request may hold. Past any of them it is refused (400) before anything is tokenized or compiled."""

    messages: int = 4096
    """Messages of a chat."""
    parts: int = 1024
    """Content parts of one message."""
    prompts: int = 16
    """Prompts of one completion request."""
    texts: int = 2048
    """Texts of one embedding request, or of one side of a score."""
    text_tokens: int = 300_000
    """Tokens of all of them together, counted while they are tokenized."""
    logprobs: int = 20
    """Likeliest tokens told with each token (``logprobs``, ``top_logprobs``, ``prompt_logprobs``)."""
    stops: int = 16
    """Stop texts."""
    stop_chars: int = 1024
    """Characters of one stop text."""
    stop_token_ids: int = 256
    """Stop token ids."""
    bias_entries: int = 1024
    """Entries of ``logit_bias``."""
    tools: int = 128
    """Tools, functions, or tool calls of one message."""
    schema_bytes: int = 64 << 10
    """JSON schema, regular expression or grammar of an answer, or the schema of a tool's arguments; as JSON."""
    schema_depth: int = 32
    """Objects and lists inside one another in a schema."""
    template_kwargs: int = 16
    """Entries of ``chat_template_kwargs``."""
    metadata_entries: int = 16
    """Entries of ``metadata``."""
    text_s: float = 10.0
    """Seconds that rendering and tokenizing of one request may take, the wait for a thread included; then 503."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            require(value > 0, f"limits.{f.name}", f"must be positive, got {value}")
