"""Two processes that share a secret prove it to each other on a fresh TCP connection, before anything else is said.

    reader ─► magic, nonce_r
              nonce_w, HMAC("writer", segment, nonces)   ◄─ writer
    reader ─► HMAC("reader", segment, nonces)               both then hold HMAC("key", segment, nonces)

The secret is never sent. Both MACs cover the whole text of the segment, which names the listener by a random id and
the writer by worker and epoch, so a proof for one listener or one process start is worth nothing to another. Every
step has a size and a deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from kvstore.errors import TransferError

MAGIC = b"PDRAYT01"
NONCE_BYTES = 32
MAC_BYTES = 32
TIMEOUT_S = 3.0
MAX_SEGMENT_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where a listener waits, and for whom. Its JSON text travels inside a grant."""

    transport: str
    host: str
    port: int
    listener_id: str  # random, so that no two listeners share a text
    worker_id: str  # of the writer
    epoch: str

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_text(cls, text: str, transport: str) -> Segment:
        """Raises TransferError on anything that a listener of this transport did not write."""
        try:
            if len(text) > MAX_SEGMENT_CHARS:
                raise ValueError(f"{len(text)} characters")
            segment = cls(**json.loads(text))
        except (ValueError, TypeError) as exc:
            raise TransferError(f"not a segment: {exc}") from None
        if segment.transport != transport:
            raise TransferError(f"the segment is one of {segment.transport!r}, this worker runs {transport!r}")
        if not isinstance(segment.port, int) or not isinstance(segment.host, str):
            raise TransferError("not a segment: host or port has the wrong type")
        return segment


def receive_exactly(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Raises TransferError when the connection ends, or the monotonic deadline passes, before that many bytes came."""
    data = bytearray()
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferError("the peer did not answer in time")
        sock.settimeout(left_s)
        try:
            piece = sock.recv(num_bytes - len(data))
        except OSError as exc:
            raise TransferError(f"the connection broke: {exc}") from None
        if not piece:
            raise TransferError("the peer closed the connection")
        data += piece
    return bytes(data)


def prove_to_reader(sock: socket.socket, secret: str, segment: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The writer's side; returns the connection's key. Raises TransferError unless the reader has the secret."""
    deadline_s = time.monotonic() + timeout_s
    hello = receive_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline_s)
    if not hello.startswith(MAGIC):
        raise TransferError("the listener speaks another protocol")
    nonces = hello[len(MAGIC) :] + os.urandom(NONCE_BYTES)
    _send(sock, nonces[NONCE_BYTES:] + _mac(secret, b"writer", segment, nonces))
    answer = receive_exactly(sock, MAC_BYTES, deadline_s)
    if not hmac.compare_digest(answer, _mac(secret, b"reader", segment, nonces)):
        raise TransferError("the listener does not have this application's secret")
    return _mac(secret, b"key", segment, nonces)


def prove_to_writer(sock: socket.socket, secret: str, segment: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The reader's side; returns the connection's key. Raises TransferError unless the writer has the secret."""
    deadline_s = time.monotonic() + timeout_s
    ours = os.urandom(NONCE_BYTES)
    _send(sock, MAGIC + ours)
    theirs = receive_exactly(sock, NONCE_BYTES + MAC_BYTES, deadline_s)
    nonces = ours + theirs[:NONCE_BYTES]
    if not hmac.compare_digest(theirs[NONCE_BYTES:], _mac(secret, b"writer", segment, nonces)):
        raise TransferError("the writer does not have this application's secret, or means another listener")
    _send(sock, _mac(secret, b"reader", segment, nonces))
    return _mac(secret, b"key", segment, nonces)


def connect_and_prove(segment: Segment, secret: str, attempts: int = 5) -> tuple[socket.socket, bytes]:
    """A connection to a listener that has proven itself, and its key.

    A refused connection is tried again for half a second, since a listener that was fenced comes back at its old port.
    Raises TransferError.
    """
    for attempt in range(attempts):
        try:
            sock = socket.create_connection((segment.host, segment.port), timeout=TIMEOUT_S)
            break
        except OSError as exc:
            if attempt + 1 == attempts or not isinstance(exc, ConnectionRefusedError):
                raise TransferError(f"cannot connect to {segment.host}:{segment.port}: {exc}") from None
            time.sleep(0.1)
    try:
        tune(sock)
        return sock, prove_to_reader(sock, secret, segment.to_text())
    except BaseException:
        sock.close()
        raise


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed in about ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _mac(secret: str, purpose: bytes, segment: str, nonces: bytes) -> bytes:
    text = segment.encode()
    return hmac.digest(secret.encode(), purpose + len(text).to_bytes(4, "big") + text + nonces, hashlib.sha256)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as exc:
        raise TransferError(f"the connection broke: {exc}") from None
