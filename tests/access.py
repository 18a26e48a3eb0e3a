"""API keys for tests of the front door: one for each kind of caller; the key of each is its name and "-key"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from services.access_config import AccessConfig
from services.router.access.keys import sha256_of
from tests.fronts import FakeCore

KEYS: dict[str, dict[str, Any]] = {
    "alice": {"tenant": "red", "scopes": ["infer"]},
    "bob": {"tenant": "blue", "scopes": ["infer"]},
    "probe": {"scopes": ["metrics"]},
    "ops": {"scopes": ["admin", "infer", "metrics"]},
    "slowly": {"limits": {"requests_per_minute": 2, "tokens_per_minute": 1000, "concurrency": 1}},
}


def write_keys(folder: Path) -> Path:
    """The file of `KEYS`."""
    path = folder / "keys.yaml"
    entries = [{"name": name, "hash": sha256_of(f"{name}-key"), **about} for name, about in KEYS.items()]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


def with_keys(core: FakeCore, folder: Path, **settings: Any) -> FakeCore:
    """The core with `KEYS`; ``settings``: of config.access."""
    core.config = replace(core.config, access=AccessConfig(keys_file=str(write_keys(folder)), **settings))
    return core


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}
