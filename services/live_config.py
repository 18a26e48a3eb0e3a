"""Settings that a running router takes over without a restart: what Serve hands it as ``user_config``.

A reload names everything that differs from the arguments the application was built with: what it leaves out is again
as it was there. Nothing that runs is cut; a request is judged by the settings at its arrival. See docs/install.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from kvstore.errors import ConfigError
from services.access_config import LimitsConfig
from services.config import ServeConfig, from_dict, to_dict

LIVE: Mapping[str, tuple[str, ...]] = {
    "access": ("requests_per_minute", "tokens_per_minute", "concurrency"),
    "admission": ("max_waiting", "max_waiting_tokens", "held_steps", "margin"),
    "budget": ("first_token_s", "idle_s", "total_s"),
    "limits": tuple(f.name for f in fields(LimitsConfig) if f.name != "text_s"),
    "router": ("policy", "max_n", "max_attempts", "rescue_wait_s"),
    "slo": ("ttft_ms", "tpot_ms", "e2e_ms"),
}
"""By section. What stands here is read anew for each request; everything else is built into what the start makes."""


def with_live(built: ServeConfig, given: Mapping[str, Any]) -> ServeConfig:
    """``built`` with the live settings of ``given``, by section or by dotted name.

    Raises:
        ConfigError: a setting that is unknown or not live, or an impossible value; begins with its dotted path.
    """
    tree = to_dict(built)
    for dotted, value in flat(given):
        section, _, name = dotted.partition(".")
        if name not in LIVE.get(section, ()):
            known = ", ".join(f"{s}.{n}" for s, names in LIVE.items() for n in names)
            raise ConfigError(f"{dotted} cannot be changed by user_config, which takes {known}")
        tree[section][name] = value
    return from_dict(tree)


def difference(built: ServeConfig, now: ServeConfig) -> dict[str, Any]:
    """Live settings that differ, by dotted name, as they are now."""
    return {
        f"{section}.{name}": getattr(getattr(now, section), name)
        for section, names in LIVE.items()
        for name in names
        if getattr(getattr(now, section), name) != getattr(getattr(built, section), name)
    }


def flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each setting. Raises ConfigError on a name that is none."""
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}{name!r} is not a setting")
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
