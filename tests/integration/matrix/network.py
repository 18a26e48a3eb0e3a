"""A network of a worker's own: a namespace for each worker, all on one bridge, and a cable that can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress


def why_not() -> str:
    """Why this machine cannot have such a network; empty where it can."""
    if os.getuid() != 0 or not shutil.which("ip"):
        return "a network cut needs root and iproute2"
    probe = f"pdm{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine makes no network namespaces"
    try:
        made = subprocess.run(["ip", "link", "add", probe, "type", "bridge"], capture_output=True)
        return "this machine makes no bridges" if made.returncode else ""
    finally:
        _ip("link", "del", probe, check=False)
        _ip("netns", "del", probe, check=False)


class Network:
    """`open` it, start each worker behind its `wrapper` at its `host`, `close` it once they have ended.

    The process that opens it stays outside, at the bridge's own address.
    """

    def __init__(self, tag: str, names: Sequence[str]) -> None:
        """``tag``: at most 6 characters, so that the names of links stay below the kernel's limit of 15."""
        self._tag = tag
        number = os.getpid() % (40 * 256)  # two runs on one machine do not meet
        self._subnet = f"10.{214 + number // 256}.{number % 256}"
        self._names = list(names)

    def open(self) -> None:
        bridge = f"{self._tag}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name in self._names:
            space, cable = self._space(name), self._cable(name)
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.host(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self._names:
            _ip("link", "del", self._cable(name), check=False)
            _ip("netns", "del", self._space(name), check=False)
        _ip("link", "del", f"{self._tag}br", check=False)

    def host(self, name: str) -> str:
        return f"{self._subnet}.{self._names.index(name) + 1}"

    def wrapper(self, name: str) -> list[str]:
        """The command that runs another one in this worker's namespace, as the same process."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, name: str) -> None:
        """From now on nothing reaches the worker, and nothing of it reaches others; nobody is told."""
        _ip("link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"{self._tag}v{self._names.index(name)}"


def _ip(*arguments: str, check: bool = True) -> None:
    with suppress(FileNotFoundError):
        subprocess.run(["ip", *arguments], check=check, capture_output=not check)
