"""API keys as a file holds them, and who presents one. A key is kept as a hash only, and no message ever shows one.

    keys:
      - name: alice                     # stands in logs, never secret
        hash: sha256:9f86d0…            # or scrypt:N:r:p:salt:hash, both from `pdray key`
        tenant: team-a                  # owns the cached KV and the limits; default: the name
        scopes: [infer]                 # infer, metrics, admin
        limits: {requests_per_minute: 60, tokens_per_minute: 100000, concurrency: 8}
    tenants:
      team-a: {concurrency: 32}

sha256 is enough for the 256 random bits of `pdray key new`; scrypt is for keys that people made up.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvstore.errors import ConfigError
from services.router.access.limits import NO_LIMITS, Limits

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = (INFER, METRICS, ADMIN)
MAX_KEYS = 1000
"""All of them are compared for each call, about 0.2 µs each."""
MAX_FILE_BYTES = 4 << 20
MAX_KEY_CHARS = 512
MAX_NAME_CHARS = 128
MAX_SCRYPT_N = 1 << 17
_SCRYPT_MEMORY = 256 << 20
_KEY_FIELDS = frozenset({"name", "hash", "tenant", "scopes", "limits"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the file."""

    name: str
    hash: str = field(repr=False)
    tenant: str
    scopes: frozenset[str]
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """What a file says."""

    keys: tuple[Key, ...] = ()
    tenants: Mapping[str, Limits] = field(default_factory=dict)


def new_key() -> str:
    """A key of 256 random bits."""
    return f"pdray-{secrets.token_urlsafe(32)}"


def sha256_of(key: str) -> str:
    """The hash that a file holds of a random key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def scrypt_of(key: str, *, n: int = 1 << 14, r: int = 8, p: int = 1) -> str:
    """The hash that a file holds of a key that somebody made up; costs about 50 ms."""
    salt = secrets.token_bytes(16)
    return f"scrypt:{n}:{r}:{p}:{salt.hex()}:{_scrypt(key, n, r, p, salt).hex()}"


def _scrypt(key: str, n: int, r: int, p: int, salt: bytes) -> bytes:
    data = key.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_MEMORY, dklen=32)


def matches(key: str, hashed: str) -> bool:
    """Whether ``hashed``, of either kind, is of this key; the comparison takes the same time wherever they differ."""
    kind, _, rest = hashed.partition(":")
    if kind == "sha256":
        return hmac.compare_digest(sha256_of(key), hashed)
    n, r, p, salt, digest = rest.split(":")
    return hmac.compare_digest(_scrypt(key, int(n), int(r), int(p), bytes.fromhex(salt)), bytes.fromhex(digest))


class KeyRing:
    """The keys of one version of the file."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._quick = [(bytes.fromhex(key.hash[7:]), key) for key in keys if key.hash.startswith("sha256:")]
        self._slow = tuple(key for key in keys if not key.hash.startswith("sha256:"))
        self._seen: list[tuple[bytes, Key]] = []  # sha256 of what matched a slow one, so that it is slow once

    @property
    def has_slow(self) -> bool:
        """Whether `find_slow` can find anything."""
        return bool(self._slow)

    def find(self, presented: str) -> Key | None:
        """Whose key this is, among those that take microseconds. Every one of them is compared, whichever matches."""
        if len(presented) > MAX_KEY_CHARS:
            return None
        digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
        found = None
        for known, key in (*self._quick, *self._seen):
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def find_slow(self, presented: str) -> Key | None:
        """Whose key this is, among those under scrypt; for a thread."""
        if len(presented) > MAX_KEY_CHARS:
            return None
        found = None
        for key in self._slow:
            if matches(presented, key.hash):
                found = key
        if found is not None and all(key is not found for _, key in self._seen):
            digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
            self._seen = [*self._seen, (digest, found)]
        return found


def read_keys(data: bytes) -> KeyFile:
    """Parse a file.

    Raises:
        ConfigError: what is wrong, and in which entry; hashes are not shown.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"access.keys_file has {len(data)} bytes, at most {MAX_FILE_BYTES} are allowed")
    try:
        tree = yaml.safe_load(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("access.keys_file is not UTF-8") from None
    except (yaml.YAMLError, RecursionError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(f"access.keys_file is neither YAML nor JSON{where}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict) or set(tree) - {"keys", "tenants"}:
        raise ConfigError("access.keys_file must be a mapping with `keys` and, if wanted, `tenants`")
    entries = tree.get("keys") or []
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ConfigError(f"access.keys_file: keys must be a list of at most {MAX_KEYS}")
    keys = tuple(_key(entry, f"access.keys_file: keys[{i}]") for i, entry in enumerate(entries))
    names = [key.name for key in keys]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ConfigError(f"access.keys_file: two keys have the name {twice!r}")
    return KeyFile(keys=keys, tenants=_tenants(tree.get("tenants") or {}))


def _tenants(tree: Any) -> dict[str, Limits]:
    if not isinstance(tree, dict):
        raise ConfigError("access.keys_file: tenants must be a mapping of names to limits")
    return {
        _name(name, "access.keys_file: a tenant's name"): _limits(value, f"access.keys_file: tenants.{str(name)[:128]}")
        for name, value in tree.items()
    }


def _key(entry: Any, path: str) -> Key:
    if not isinstance(entry, dict) or (unknown := set(entry) - _KEY_FIELDS):
        known = ", ".join(sorted(_KEY_FIELDS))
        what = f"{sorted(map(str, unknown))} is unknown" if isinstance(entry, dict) else "this is no mapping"
        raise ConfigError(f"{path} has the fields {known}; {what}")
    name = _name(entry.get("name"), f"{path}.name")
    tenant = name if entry.get("tenant") is None else _name(entry["tenant"], f"{path}.tenant")
    scopes = entry.get("scopes", [INFER])
    if not isinstance(scopes, list) or not set(map(str, scopes)) <= set(SCOPES):
        raise ConfigError(f"{path}.scopes must be a list of {', '.join(SCOPES)}")
    hashed = entry.get("hash")
    if not isinstance(hashed, str) or not _is_hash(hashed):
        raise ConfigError(f"{path}.hash must be sha256:… or scrypt:…, as `pdray key hash` prints it")
    limits = _limits(entry.get("limits") or {}, f"{path}.limits")
    return Key(name=name, hash=hashed, tenant=tenant, scopes=frozenset(map(str, scopes)), limits=limits)


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise ConfigError(f"{path} must be printable text of 1 to {MAX_NAME_CHARS} characters")
    return value


def _limits(value: Any, path: str) -> Limits:
    known = Limits.__dataclass_fields__
    if not isinstance(value, dict) or set(value) - set(known):
        raise ConfigError(f"{path} must be a mapping with some of {', '.join(known)}")
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"{path}.{name} must be a whole number, 0 for no limit, got {number!r}")
    return Limits(**value)


def _is_hash(text: str) -> bool:
    kind, _, rest = text.partition(":")
    try:
        if kind == "sha256":
            return len(rest) == 64 and len(bytes.fromhex(rest)) == 32
        n, r, p, salt, digest = rest.split(":")
        cost = 2 <= int(n) <= MAX_SCRYPT_N and int(n).bit_count() == 1 and 1 <= int(r) <= 16 and 1 <= int(p) <= 4
        return kind == "scrypt" and cost and len(bytes.fromhex(salt)) >= 8 and len(bytes.fromhex(digest)) == 32
    except ValueError:
        return False
