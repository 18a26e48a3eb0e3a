"""Small JSON messages over a proven connection, each with a keyed check and a number, so that none is added, lost or
turned back."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
from typing import Any

from kvstore.errors import TransferError
from kvstore.transfer.handshake import receive_exactly

MAX_MESSAGE_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")
_MAC_BYTES = 16


class Talk:
    """One end of a conversation; the ends differ by ``is_writer``. Raises TransferError where the other end is gone."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_writer: bool) -> None:
        self._socket = sock
        self._key = key
        self._ours = b"w" if is_writer else b"r"
        self._theirs = b"r" if is_writer else b"w"
        self._sent = 0
        self._received = 0

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        self._sent += 1
        try:
            self._socket.settimeout(2.0)
            self._socket.sendall(_LENGTH.pack(len(body)) + body + self._mac(self._ours, self._sent, body))
        except OSError as exc:
            raise TransferError(f"the connection broke: {exc}") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size, deadline_s))
        if length > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        body = receive_exactly(self._socket, length, deadline_s)
        self._received += 1
        mac = receive_exactly(self._socket, _MAC_BYTES, deadline_s)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise TransferError("a message without the connection's key, or out of order")
        try:
            message = json.loads(body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise TransferError("a message that is no JSON object")
        return message

    def wait(self, timeout_s: float) -> bool:
        """True once there is something to receive, or the connection ended."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self._socket.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        text = direction + number.to_bytes(8, "big") + body
        return hashlib.blake2b(text, key=self._key, digest_size=_MAC_BYTES).digest()
