"""Whose requests they are: names with API keys, in turn or by weight. Keys are never shown and never saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.errors import ConfigError

_SEED = 2**35


@dataclass(frozen=True, slots=True)
class Tenants:
    """``keys``: an API key by name; ``weights``: shares of the requests, empty for equal ones in turn."""

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    weights: Sequence[float] = ()

    @classmethod
    def parse(cls, pairs: Sequence[str], weights: Sequence[float]) -> Tenants:
        """``["a=KEY", "b=@FILE"]``. Raises ConfigError; its message holds no key."""
        keys: dict[str, str] = {}
        for pair in pairs:
            name, equals, key = pair.partition("=")
            if not equals or not name.strip() or name.strip() in keys:
                raise ConfigError("--tenant: give it as NAME=KEY or NAME=@FILE, each name once")
            keys[name.strip()] = read_key(key)
        if weights and (len(weights) != len(keys) or min(weights) < 0 or sum(weights) <= 0):
            raise ConfigError(f"--tenant-weights: {len(weights)} weights for {len(keys)} tenants, each at least 0")
        return cls(keys, tuple(weights))

    @property
    def first(self) -> str:
        return next(iter(self.keys), "")

    def of_each(self, count: int, seed: int) -> list[str]:
        """The tenant of each request; "" without tenants."""
        names = list(self.keys)
        if not names:
            return [""] * count
        if not self.weights:
            return [names[i % len(names)] for i in range(count)]
        shares = np.array(self.weights, dtype=np.float64) / sum(self.weights)
        return [names[i] for i in np.random.default_rng((seed, _SEED)).choice(len(names), size=count, p=shares)]


def read_key(text: str) -> str:
    """A key as given, or the first line of ``@FILE``. Raises ConfigError."""
    key = text
    if text.startswith("@"):
        try:
            key = Path(text[1:]).read_text(encoding="utf-8").strip().partition("\n")[0]
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the file of an API key, {text[1:]}: {exc}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError("an API key must be printable ASCII, and not empty")
    return key
