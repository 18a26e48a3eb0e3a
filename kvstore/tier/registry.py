"""Connectors by name: ours, those that other packages register, and any class that can be imported.

A third party's package names its class in the entry point group ``pdray.connectors``; the class takes the engine's
memory and `TierOptions`, and has the verbs of `kvstore.tier.base.Connector`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import cast

from kvstore.errors import ConfigError
from kvstore.tensors import KVMemory
from kvstore.tier.base import Connector

GROUP = "pdray.connectors"
BUILT_IN = {"host": "kvstore.tier.host:HostTier", "lmcache": "kvstore.tier.lmcache:LMCacheTier"}
VERBS = (
    "lookup", "reserve", "start_load", "wait_layer", "errors", "finish", "abort", "fenced",
    "save_layer", "saved", "poll", "stats", "close",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What a connector may need beside the memory."""

    host_bytes: int = 1 << 30
    chunk_tokens: int = 256
    model: str = ""  # fingerprint of the weights; the names of blocks depend on it already
    extra: Mapping[str, str] = field(default_factory=dict)  # the connector's own settings


def make_connector(name: str, memory: KVMemory, options: TierOptions) -> Connector | None:
    """The connector of that name over the engine's memory; None for ``off``.

    Args:
        name: ``off``, ``host``, ``lmcache``, a name in the entry point group, or ``module:Class``.
    Raises:
        ConfigError: it is unknown, cannot be loaded, lacks a verb, or refuses its options; says which.
    """
    if name == "off":
        return None
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        found = {point.name: point.value for point in entry_points(group=GROUP)}
        if target not in found:
            known = ", ".join(["off", *sorted({*BUILT_IN, *found})])
            raise ConfigError(f"tier.connector {name!r} is none of {known}, and no module:Class")
        target = found[target]
    module_name, _, class_name = target.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"tier.connector {name!r} cannot be loaded: {exc}") from None
    missing = [verb for verb in VERBS if not hasattr(made, verb)]
    if missing:
        raise ConfigError(f"tier.connector {name!r}: {class_name} has no {', '.join(missing)}")
    connector = made(memory, options)
    if not hasattr(connector, "chunk_blocks"):
        raise ConfigError(f"tier.connector {name!r}: {class_name} does not say its chunk_blocks")
    return cast(Connector, connector)
