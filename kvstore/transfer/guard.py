"""Keeps strangers out of listening sockets that a library opened on all interfaces without asking anybody for a secret.

Two means, which need no privilege:

- A classic packet filter on each listening socket (SO_ATTACH_FILTER). It sees every segment that reaches the
listener, the SYN and
  the ACK that completes a handshake, and drops them; connections that were accepted before are sockets of their own
  and stay.
- The kernel's table of connections (/proc/self/net/tcp), which tells who is connected, be it accepted or still in the
backlog.

    shut ─► ajar(address) ─► shut        while ajar one address may connect; afterwards `connections` shows who did

Source: socket(7) and Linux's Documentation/networking/filter.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import TransferError

_SO_ATTACH_FILTER = 26
_NET_OFF = 0xFFF00000  # -0x100000: offsets from here count from the network header
_LD_WORD, _LD_BYTE, _RSHIFT, _JEQ, _RET = 0x20, 0x30, 0x74, 0x15, 0x06
_PASS, _DROP = 0xFFFFFFFF, 0
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_LIVE = {"01", "03", "08"}  # established, in handshake, closed by the other end but perhaps unread
_ENDING = {"04", "05", "09", "0B"}  # closed by our end, unless somebody still holds the descriptor

opening = threading.Lock()
"""Held while a socket is opened that must not be taken for one of a library, or while a library opens its own."""

Address = tuple[str, int]
Instruction = tuple[int, int, int, int]


def _load(offset: int, size: int = _LD_WORD) -> Instruction:
    return size, 0, 0, (_NET_OFF + offset) & 0xFFFFFFFF


def shut_program() -> list[Instruction]:
    return [(_RET, 0, 0, _DROP)]


def ajar_program(address: str) -> list[Instruction]:
    """Pass segments whose IP source is this address, drop all others."""
    source = ipaddress.ip_address(address)
    mapped = getattr(source, "ipv4_mapped", None)
    source = mapped or source
    words = struct.unpack(f">{len(source.packed) // 4}I", source.packed)
    start = _IPV4_SOURCE if source.version == 4 else _IPV6_SOURCE
    checks: list[Instruction] = []
    for index, word in enumerate(words):
        left = 2 * (len(words) - index) - 1  # instructions from the next one to the drop
        checks += [_load(start + 4 * index), (_JEQ, 0, left, word)]
    version: list[Instruction] = [
        _load(0, _LD_BYTE),
        (_RSHIFT, 0, 0, 4),
        (_JEQ, 0, len(checks) + 1, source.version),
    ]
    return [*version, *checks, (_RET, 0, 0, _PASS), (_RET, 0, 0, _DROP)]


def attach(sock: socket.socket, program: Iterable[Instruction]) -> None:
    """Raises OSError where the kernel refuses filters."""
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    code = ctypes.create_string_buffer(packed, len(packed))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(packed) // 8, ctypes.addressof(code)))


@dataclass(frozen=True, slots=True)
class Connection:
    local: Address
    remote: Address
    inode: int  # 0: no process holds it (yet)


def _parse_address(text: str) -> Address:
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def connections() -> list[Connection]:
    """All TCP connections of this network namespace over which bytes may still come."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                state, inode = fields[3], int(fields[9])
                if state in _LIVE or (state in _ENDING and inode):
                    found.append(Connection(_parse_address(fields[1]), _parse_address(fields[2]), inode))
    return found


def can_list_connections() -> bool:
    return os.access("/proc/self/net/tcp", os.R_OK)


def own_sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def own_connections(ports: Collection[int]) -> list[Address]:
    """Our ends of this process's connections to these remote ports."""
    inodes = own_sockets()
    return [c.local for c in connections() if c.remote[1] in ports and c.inode in inodes]


class Guard:
    """Holds the listening sockets that were opened since ``before`` (an earlier `own_sockets`), shut from the start.

    Owns a duplicate of each descriptor until `close`.
    """

    def __init__(self, before: Collection[int]) -> None:
        self._sockets: list[socket.socket] = []
        self.ports: set[int] = set()
        for inode, fd in own_sockets().items():
            if inode in before:
                continue
            sock = socket.socket(fileno=os.dup(fd))
            is_inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
            if is_inet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._sockets.append(sock)
                self.ports.add(sock.getsockname()[1])
            else:
                sock.close()
        try:
            self.shut()
        except OSError as exc:
            self.close()
            raise TransferError(f"the kernel refuses a filter on a listening socket: {exc}") from None

    def shut(self) -> None:
        for sock in self._sockets:
            attach(sock, shut_program())

    def set_ajar(self, address: str) -> None:
        for sock in self._sockets:
            attach(sock, ajar_program(address))

    def connected(self) -> set[Address]:
        """The other ends of all connections to the guarded sockets."""
        return {c.remote for c in connections() if c.local[1] in self.ports}

    def close(self) -> None:
        """Let go of the sockets; call it when their owner has closed them, or is about to."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
