"""Every setting of pdray: frozen dataclasses filled from YAML, environment and command line; the later weighs more.

This module is the only reader of ``os.environ`` and the only setter of Mooncake's ``MC_*`` variables.
Unknown keys are errors, and an error starts with the dotted path of the key.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvstore.errors import ConfigError
from services.access_config import AccessConfig as AccessConfig
from services.access_config import LimitsConfig as LimitsConfig
from services.access_config import TlsConfig as TlsConfig
from services.engine_config import EngineConfig as EngineConfig
from services.engine_config import require as _require
from services.redis_config import RedisConfig as RedisConfig
from services.slo_config import AdmissionConfig as AdmissionConfig
from services.slo_config import HealthConfig as HealthConfig
from services.slo_config import SLOConfig as SLOConfig
from services.tier_config import TierConfig as TierConfig
from services.transfer_config import TransferConfig as TransferConfig

ROLES = ("prefill", "decode", "mixed")
DTYPES = ("auto", "bfloat16", "float32")
PAIR_POLICIES = ("cost", "round-robin", "least-loaded", "power-of-two", "prefix-only", "dynamo", "llm-d")
ENV_PREFIX = "PDRAY_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    path: str = "default"
    """Folder, hub id, GGUF file, or ``default`` (SmolLM2-135M-Instruct)."""
    served_name: str = ""
    """Name in the OpenAI API; empty: the prepared model's own name."""
    dtype: str = "auto"
    """Of weights and KV. ``auto``: bfloat16 where the CPU has AVX-512 bf16 or AMX, else float32."""
    max_model_len: int = 0
    """Tokens of prompt and answer together; 0: the model's own limit, at most 8192."""
    cache_dir: str = ""
    """Where prepared models lie; empty: ``~/.cache/pdray/models``."""
    trust_remote_code: bool = False
    tool_parser: str = "auto"
    """Format of function calls: ``hermes``, ``llama3_json``, ``mistral``, or ``auto``, which the template tells."""

    def __post_init__(self) -> None:
        parsers = ("auto", "hermes", "llama3_json", "mistral")
        _require(
            self.tool_parser in parsers, "model.tool_parser", f"must be one of {parsers}, got {self.tool_parser!r}"
        )
        _require(self.dtype in DTYPES, "model.dtype", f"must be one of {DTYPES}, got {self.dtype!r}")
        _require(self.max_model_len >= 0, "model.max_model_len", f"must not be negative, got {self.max_model_len}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How long a request may take; no stage outlasts what is left."""

    first_token_s: float = 60.0
    idle_s: float = 60.0
    """Longest gap between two tokens of a stream."""
    total_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("first_token_s", "idle_s", "total_s"):
            _require(getattr(self, name) > 0, f"budget.{name}", f"must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The front: HTTP, gRPC, text and the choice of a pair."""

    host: str = "127.0.0.1"
    port: int = 8000
    """HTTP; 0: a free one, registered and printed."""
    grpc_port: int = 9000
    """gRPC; 0: a free one."""
    serve_port: int = 8001
    """HTTP of Serve's own proxy, in what we start."""
    serve_grpc_port: int = 9001
    replicas: int = 1
    policy: str = "cost"
    """``cost`` (predicted ms: overlap, load, bookings); the others are for comparison: docs/routing.md."""
    pull: str = "auto"
    """Prefill workers load KV that another worker holds, above all of a conversation's earlier turns: ``auto``, where
    that is predicted to be faster than computing it; or ``off``."""
    first_wait_s: float = 5.0
    """A stream whose first token takes longer gets its 200 and a comment, so that no proxy gives up on it; until then
    a failure is a status of its own."""
    ping_s: float = 10.0
    """Longest silence on a stream; then a comment goes out."""
    max_body_bytes: int = 8 << 20
    max_queue: int = 1024
    """Requests in the router at once; one more gets 503."""
    timelines_kept: int = 1024
    """Finished requests shown at /debug/requests."""
    record_trace: str = ""
    """File that gets live arrivals in Mooncake's form, without text; see docs/admission.md. Empty: none."""
    max_attempts: int = 4
    """Tries of one request in all: submissions, retargets and migrations of a stream. Four are one way down the whole
    ladder: a new reader, another pair, one worker for all."""
    rescue_wait_s: float = 1.0
    """How long a request whose worker was lost waits for one that can take it over, where none is there. It covers a
    stream that is re-attached, a stall that ends, a successor that is nearly up; a client hears of the failure within
    two seconds all the same. 0: not at all."""
    max_n: int = 16
    """Choices that one request may ask for (``n``); they share its prompt's KV."""

    def __post_init__(self) -> None:
        for name in ("max_n", "max_attempts"):
            _require(getattr(self, name) >= 1, f"router.{name}", f"must be at least 1, got {getattr(self, name)}")
        _require(self.rescue_wait_s >= 0, "router.rescue_wait_s", f"must not be negative, got {self.rescue_wait_s}")
        for name in ("first_wait_s", "ping_s"):
            _require(getattr(self, name) > 0, f"router.{name}", f"must be positive, got {getattr(self, name)}")
        for name in ("port", "grpc_port", "serve_port", "serve_grpc_port"):
            value = getattr(self, name)
            _require(0 <= value < 65536, f"router.{name}", f"must be a port number or 0, got {value}")
        _require(self.pull in ("auto", "off"), "router.pull", f"must be auto or off, got {self.pull!r}")
        _require(
            self.policy in PAIR_POLICIES,
            "router.policy",
            f"must be {', '.join(PAIR_POLICIES[:-1])} or {PAIR_POLICIES[-1]}, got {self.policy!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What all worker roles share."""

    host: str = "127.0.0.1"
    """Address to bind and to register; on a cluster the node's own."""
    port: int = 0
    drain_s: float = 60.0
    """How long a stopping worker waits for its requests."""
    stall_s: float = 5.0
    """Work without progress for so long is a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """One application. The counts are replicas of each deployment."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    secret: str = ""
    """Shared by all processes of an application; signs calls and registrations, never sent. Empty: one is made."""
    log_dir: str = ""
    workers: tuple[str, ...] = ()
    """Static addresses of workers, host:port; beside Redis and Ray, the third source of discovery."""
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tier: TierConfig = field(default_factory=TierConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    slo: SLOConfig = field(default_factory=SLOConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        for name in ROLES:
            _require(getattr(self, name) >= 0, name, f"must not be negative, got {getattr(self, name)}")

    def check_pairs(self) -> None:
        """Raise ConfigError where these replica counts could never answer a request."""
        if self.mixed == 0 and (self.prefill == 0 or self.decode == 0):
            raise ConfigError(
                f"prefill={self.prefill}, decode={self.decode}, mixed=0 serves nothing: "
                "give both prefill and decode, or mixed"
            )


T = TypeVar("T")


def _coerce(value: Any, kind: Any, path: str) -> Any:
    """Turn a YAML, environment or command-line value into the field's type."""
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        return tuple(str(v).strip() for v in items if str(v).strip())
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("1", "true", "yes", "on"):
            return True
        if str(value).lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{path} must be true or false, got {value!r}")
    if kind in (int, float):
        if isinstance(value, bool):
            raise ConfigError(f"{path} must be a number, got {value!r}")
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ConfigError(f"{path} must be a whole number, got {value!r}")
        try:
            return kind(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{path} must be of type {kind.__name__}, got {value!r}") from None
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{path} must be text, got {value!r}")
    return str(value)


def _build(cls: type[T], data: Mapping[str, Any], path: str) -> T:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            raise ConfigError(f"{where} is not a setting; known here: {', '.join(sorted(known))}")
        kind = hints[key]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where} must be a mapping, got {value!r}")
            values[key] = _build(kind, value, where)
        else:
            values[key] = _coerce(value, kind, where)
    return cls(**values)


def _put(tree: MutableMapping[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        node = tree.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: {name} is not a section")
        tree = node
    tree[leaf] = value


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """PDRAY_ENGINE__BLOCK_SIZE=32 → {"engine.block_size": "32"}; unknown names are left alone, they are others'."""
    known = set(_dotted_names(ServeConfig))
    found = {}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX):
            dotted = name[len(ENV_PREFIX) :].lower().replace("__", ".")
            if dotted in known:
                found[dotted] = value
    return found


def _dotted_names(cls: type, path: str = "") -> list[str]:
    names: list[str] = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind, where = hints[f.name], f"{path}{f.name}"
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            names += _dotted_names(kind, where + ".")
        else:
            names.append(where)
    return names


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``under``, section by section."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def load(
    file: str | Path | None = None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> ServeConfig:
    """Read ``defaults``, a YAML file, PDRAY_* variables, ``overrides``; the later wins, a None says nothing.

    ``defaults`` and ``overrides`` have dotted names.

    Raises:
        ConfigError: an unknown key, a wrong type or an impossible value; the message starts with the dotted path.
    """
    tree: dict[str, Any] = {}
    for dotted, value in defaults.items():
        _put(tree, dotted, value)
    if file is not None:
        try:
            loaded = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as exc:
            raise ConfigError(f"config file {file}: {exc}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {file} must hold a mapping")
        tree = _merge(tree, loaded or {})
    for dotted, value in _from_environment(os.environ if environ is None else environ).items():
        _put(tree, dotted, value)
    for dotted, value in overrides.items():
        if value is not None:
            _put(tree, dotted, value)
    return _build(ServeConfig, tree, "")


def to_dict(config: ServeConfig) -> dict[str, Any]:
    """Plain data that `from_dict` turns back into an equal ServeConfig (JSON and YAML safe)."""
    data = dataclasses.asdict(config)
    data["workers"] = list(config.workers)
    return data


def from_dict(data: Mapping[str, Any]) -> ServeConfig:
    return _build(ServeConfig, data, "")


def set_mooncake_environment(config: TransferConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Set Mooncake's MC_* variables; call before it is imported, in the transfer process only."""
    env = os.environ if environ is None else environ
    env.setdefault("MC_LOG_LEVEL", "ERROR")
    env.setdefault("GLOG_minloglevel", "2")
    env.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    env.setdefault("MC_TCP_LANES_PER_PEER", "4")
    env.setdefault("MC_HANDSHAKE_CONNECT_TIMEOUT", "5")
    if config.wanted != "rdma":
        env.setdefault("MC_FORCE_TCP", "1")
    for pair in config.mooncake_env:
        name, _, value = pair.partition("=")
        env[name] = value


def set_ray_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Set what a Ray cluster of our own needs. Call before ray is imported.

    No usage report leaves the machine, and replicas, which do all the work here, are not nicer than other processes.
    """
    env = os.environ if environ is None else environ
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("RAY_worker_niceness", "0")


def home() -> Path:
    """Folder for caches and run state: $PDRAY_HOME, else ~/.cache/pdray."""
    return Path(os.environ.get("PDRAY_HOME") or Path.home() / ".cache" / "pdray")
