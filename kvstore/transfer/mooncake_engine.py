"""One Mooncake TransferEngine, behind a guard from its first moment, and gone when `close` returns.

Mooncake listens on all interfaces, whatever it is told, and serves everybody who reaches it; every engine therefore
is made here. It is imported in functions only, since importing needs system libraries that a machine may lack.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from kvstore.errors import TransferError, TransportUnavailable
from kvstore.transfer import guard
from kvstore.transfer.base import ChannelStuck, Region

MIN_VERSION = (0, 3, 13)  # the first whose receiver checks addresses and acknowledges writes
APT = "apt-get install -y libibverbs1 librdmacm1 libnuma1"
_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_USE_S = 2.0


def load_engine_class() -> Any:
    """Mooncake's TransferEngine. Raises TransportUnavailable, with the command that helps."""
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        raise TransportUnavailable("mooncake is not installed; pip install 'pdray[mooncake]'") from None
    except ImportError as exc:
        raise TransportUnavailable(f"mooncake cannot be loaded: {exc}; {APT}") from None
    version = _installed_version()
    if version < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise TransportUnavailable(f"mooncake {'.'.join(map(str, version))} is installed, {needed} or later is needed")
    return TransferEngine


def _installed_version() -> tuple[int, ...]:
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(name))[:3])
    return (0,)


def check_filter() -> None:
    """Prove on a socket of our own that a filter keeps connections out. Raises TransportUnavailable where it does
    not."""
    with guard.opening, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        try:
            guard.attach(server, guard.shut_program())
        except OSError as exc:
            raise TransportUnavailable(f"this kernel refuses filters on sockets: {exc}") from None
        client.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            client.connect(server.getsockname())
            raise TransportUnavailable("this kernel ignores filters on listening sockets")
        if not guard.can_list_connections():
            raise TransportUnavailable("/proc/self/net/tcp cannot be read, so strangers could not be seen")


class GuardedEngine:
    """An engine whose listening sockets are shut. Any thread may call it; `close` waits until none is inside.

    The engine itself is never handed out, since it lives as long as anybody refers to it.
    """

    def __init__(self, host: str, protocol: str, device: str) -> None:
        self._host = host
        self._protocol = protocol
        self._device = device
        self._engine: Any = None
        self._inside = threading.Lock()
        self._regions: list[int] = []
        self.guard: guard.Guard | None = None
        self.target = ""  # what another engine calls this one

    def open(self) -> None:
        """Raises TransferError, TransportUnavailable."""
        try:
            self._start(load_engine_class())
        except BaseException:
            self.close()
            raise

    def _start(self, engine_class: Any) -> None:
        with guard.opening:
            before = set(guard.own_sockets())
            self._engine = engine_class()
            code = self._engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
            self.guard = guard.Guard(before)
        if code != 0:
            raise TransferError(f"mooncake could not start on {self._host} with {self._protocol} (code {code})")
        rpc_port = self._engine.get_rpc_port()
        self.target = f"[{self._host}]:{rpc_port}" if ":" in self._host else f"{self._host}:{rpc_port}"
        if rpc_port not in self.guard.ports:
            raise TransferError("mooncake's listening sockets were not found, so they cannot be guarded")
        if self.guard.connected():
            raise TransferError("somebody connected to mooncake before it was guarded")

    @property
    def ports(self) -> set[int]:
        assert self.guard is not None
        return self.guard.ports

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._inside:
            if self._engine is None:
                raise TransferError("the engine is closed")
            yield

    def submit_write(self, target: str, source: int, destination: int, num_bytes: int) -> int:
        """Mooncake's id of a write from our address to the target's; 0 where it was not started."""
        with self._entered():
            transfer = int(self._engine.transfer_submit_write(target, source, destination, num_bytes))
        return transfer if 0 < transfer < 1 << 63 else 0

    def check_status(self, transfer: int) -> int:
        """1: done, 0: pending, below: failed. Only to be asked while it is pending."""
        with self._entered():
            return int(self._engine.transfer_check_status(transfer))

    def register(self, region: Region) -> None:
        """Make memory reachable for whoever is connected."""
        with self._entered():
            if region.address in self._regions:
                return
            code = self._engine.register_memory(region.address, region.num_bytes)
            if code != 0:
                raise TransferError(f"mooncake could not register {region.num_bytes} bytes (code {code})")
            self._regions.append(region.address)

    def unregister(self, region: Region) -> None:
        """New requests for this memory are refused; one under way is not stopped."""
        with self._entered():
            if region.address in self._regions:
                self._engine.unregister_memory(region.address)
                self._regions.remove(region.address)

    def wait_unconnected(self, timeout_s: float) -> bool:
        """True once no connection to this engine is left over which bytes could come."""
        assert self.guard is not None
        deadline_s = time.monotonic() + timeout_s
        while self.guard.connected():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Destroy the engine; takes up to a second and holds the interpreter meanwhile.

        Raises ChannelStuck where a thread does not come out of it.
        """
        if not self._inside.acquire(timeout=_USE_S):
            raise ChannelStuck("a thread does not return from mooncake")
        try:
            self._engine = None  # the last reference
        finally:
            self._inside.release()
        if self.guard is not None:
            self.guard.close()
