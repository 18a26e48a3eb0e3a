"""The core of access: from a presented key to a `Caller`, and from a caller and a rule to a refusal.

The file is read at the start, and again whenever it changes: what runs goes on, buckets keep their level. A file that
vanished or broke leaves the keys as they were, and the log says so; a file without keys lets nobody in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError
from services.access_config import AccessConfig
from services.protocol.errors import ErrorCode, RequestError
from services.router.access.audit import Audit
from services.router.access.caller import ANONYMOUS, Caller
from services.router.access.keys import MAX_FILE_BYTES, Key, KeyFile, KeyRing, read_keys
from services.router.access.limits import NO_LIMITS, Limits, Meter
from services.router.access.scopes import Rule

MAX_SLOW_CHECKS = 16
"""Keys that wait for scrypt at once; one more gets 503."""

REASONS = ("missing", "unknown", "scope", "limit", "busy")
"""No key; one that nobody has; a key without the scope; one past its requests or concurrency; too many to check."""

_log = logging.getLogger("pdray.router.access")
_Stamp = tuple[int, int, int]


class Guard:
    """One for all fronts of a router: construct, `start`, and `stop` last."""

    def __init__(
        self,
        config: AccessConfig,
        clock: Callable[[], float] = time.monotonic,
        on_refusal: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """``on_refusal``: told of each caller that is turned away, by one of `REASONS`; never of what was presented.

        Raises ConfigError where the keys file cannot be used.
        """
        self._config = config
        self._on_refusal = on_refusal
        self.clock = clock
        self.audit = Audit()
        self._path = Path(config.keys_file) if config.keys_file else None
        self._anonymous = ANONYMOUS
        self._found = KeyFile(keys=(), tenants={})
        self._tenants: dict[str, Meter] = {}
        self._key_meters: dict[str, Meter] = {}
        self._callers: dict[str, Caller] = {}
        self._ring = KeyRing(())
        self._slow_checks = 0
        self._stamp: _Stamp | None = None
        self._complaint = ""
        self._watcher: asyncio.Task[None] | None = None
        if self._path is not None:
            self._stamp, self._found = _read(self._path)
        self.set_defaults(config)

    def set_defaults(self, config: AccessConfig) -> None:
        """Other limits for tenants without their own, or for everybody where there are no keys; buckets stay as full
        as they are."""
        self._defaults = Limits(
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrency=config.concurrency,
        )
        if self._path is not None:
            self._take(self._found)
        elif self._defaults == NO_LIMITS:
            self._anonymous = ANONYMOUS
        else:
            old = self._anonymous.meters[0] if self._anonymous.meters else None
            self._anonymous = Caller(meters=(self._meter(old, "this router", self._defaults),))

    @property
    def wants_keys(self) -> bool:
        return self._path is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is asked of anybody: no keys, no limits."""
        return self._path is None and not self._anonymous.meters

    def start(self) -> None:
        """Open the audit file and watch the keys file."""
        self.audit.open(self._config.audit_file)
        if self._path is not None:
            self._watcher = asyncio.create_task(self._watch(self._path), name="keys-file")

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self.audit.close()

    async def caller(self, presented: str | None, rule: Rule) -> Caller:
        """Who presents this key, if the rule lets them. Raises what `identify` and `authorize` do."""
        caller = await self.identify(presented, rule)
        self.authorize(caller, rule)
        return caller

    async def identify(self, presented: str | None, rule: Rule) -> Caller:
        """Who presents this key; what the rule leaves open asks for none.

        Raises:
            RequestError: UNAUTHENTICATED, or OVERLOADED while too many keys are checked.
        """
        if self._path is None or rule.scopes is None:
            return self._anonymous
        if not presented:
            self._on_refusal("missing")
            raise RequestError(
                ErrorCode.UNAUTHENTICATED, "this server wants an API key: send `Authorization: Bearer KEY` or x-api-key"
            )
        caller = await self._find(presented)
        if caller is None:
            self._on_refusal("unknown")
            raise RequestError(ErrorCode.UNAUTHENTICATED, "the API key that was sent is not known here")
        return caller

    def authorize(self, caller: Caller, rule: Rule) -> None:
        """Raises RequestError PERMISSION_DENIED where none of the caller's scopes is one of the rule's."""
        if rule.scopes is not None and not caller.scopes & rule.scopes:
            self._on_refusal("scope")
            wanted = " or ".join(sorted(rule.scopes))
            raise RequestError(ErrorCode.PERMISSION_DENIED, f"key {caller.name!r} lacks the scope {wanted} for this")

    @contextlib.contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """See `Caller.running`. Raises RequestError RATE_LIMITED."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(caller.running(self.clock))
            except RequestError:
                self._on_refusal("limit")
                raise
            yield

    async def _find(self, presented: str) -> Caller | None:
        ring = self._ring
        key = ring.find(presented)
        if key is None and ring.has_slow:
            if self._slow_checks >= MAX_SLOW_CHECKS:
                self._on_refusal("busy")
                raise RequestError(ErrorCode.OVERLOADED, "too many API keys are being checked", retry_after_s=1.0)
            self._slow_checks += 1
            try:
                key = await asyncio.to_thread(ring.find_slow, presented)
            finally:
                self._slow_checks -= 1
        return None if key is None else self._callers.get(key.name)

    async def _watch(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._config.reload_s)
            await self.reload(path)

    async def reload(self, path: Path) -> None:
        """Read the file again if it has changed."""
        try:
            if await asyncio.to_thread(_stamp_of, path) == self._stamp:
                return
            self._stamp, found = await asyncio.to_thread(_read, path)
        except (OSError, ConfigError) as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                _log.error("keys stay as they were: %s", exc)
            return
        self._complaint = ""
        self._take(found)
        _log.info("read %d API keys anew", len(found.keys))
        self.audit.tell(action="reload keys", outcome=f"{len(found.keys)} keys")

    def _take(self, found: KeyFile) -> None:
        self._found = found
        self._ring = KeyRing(found.keys)
        tenants = {key.tenant: found.tenants.get(key.tenant, NO_LIMITS).or_else(self._defaults) for key in found.keys}
        self._tenants = {
            name: self._meter(self._tenants.get(name), f"tenant {name!r}", limits) for name, limits in tenants.items()
        }
        self._key_meters = {
            key.name: self._meter(self._key_meters.get(key.name), f"key {key.name!r}", key.limits) for key in found.keys
        }
        self._callers = {key.name: self._caller_of(key) for key in found.keys}

    def _meter(self, old: Meter | None, name: str, limits: Limits) -> Meter:
        now_s = self.clock()
        if old is None:
            return Meter(name, limits, now_s)
        old.set_limits(limits, now_s)
        return old

    def _caller_of(self, key: Key) -> Caller:
        meters = (self._key_meters[key.name], self._tenants[key.tenant])
        return Caller(name=key.name, tenant=key.tenant, scopes=key.scopes, meters=meters)


def _stamp_of(path: Path) -> _Stamp:
    about = os.stat(path)
    return about.st_mtime_ns, about.st_ino, about.st_size


def _read(path: Path) -> tuple[_Stamp, KeyFile]:
    """Raises ConfigError."""
    try:
        with contextlib.closing(path.open("rb")) as file:
            about = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"access.keys_file: {path} cannot be read: {exc.strerror}") from None
    return (about.st_mtime_ns, about.st_ino, about.st_size), read_keys(data)
