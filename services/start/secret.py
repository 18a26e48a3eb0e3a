"""The secret an application's processes share, where the configuration gives none."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from pathlib import Path

from services.config import ServeConfig, home

_MIN_CHARACTERS = 32


def with_new_secret(config: ServeConfig) -> ServeConfig:
    """For one run: a fresh secret unless one is set."""
    return config if config.secret else dataclasses.replace(config, secret=secrets.token_urlsafe(32))


def with_kept_secret(config: ServeConfig, folder: Path | None = None) -> ServeConfig:
    """For an application that is built again at each deploy: the same secret each time, unless one is set.

    It lies in ``<home>/run/secret-<namespace>``, readable by its owner only. A new secret at each build would change
    every deployment's arguments, and workers of the old and the new version could not speak to each other.
    """
    if config.secret:
        return config
    folder = folder or home() / "run"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"secret-{config.redis.namespace.replace('/', '_')}"
    return dataclasses.replace(config, secret=_read_or_create(path))


def _read_or_create(path: Path) -> str:
    """The file's secret; of several processes that find none, the first one's link wins."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
        if path.exists() and len(path.read_text(encoding="ascii").strip()) < _MIN_CHARACTERS:
            path.unlink()  # cut short by a full disk: as good as none
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    return path.read_text(encoding="ascii").strip()
