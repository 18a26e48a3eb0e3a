"""The frames of the tcp transport: a header with a keyed check, a payload, an acknowledgement."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvstore.errors import TransferError

_BODY = struct.Struct(">QQQ16s")
_MAC_BYTES = 16
HEADER_BYTES = _BODY.size + _MAC_BYTES
ACK = struct.Struct(">QB")
LANDED, REFUSED = 1, 2


@dataclass(frozen=True, slots=True)
class Frame:
    sequence: int  # from 1 in each connection; also the id of the write
    offset: int  # in the reader's memory
    num_bytes: int
    ticket: bytes  # `ticket_key`


def ticket_key(ticket_id: str) -> bytes:
    """16 bytes that stand for a ticket."""
    return hashlib.blake2b(ticket_id.encode(), digest_size=16).digest()


def pack(frame: Frame, key: bytes) -> bytes:
    """The header of a frame on a connection with this key."""
    body = _BODY.pack(frame.sequence, frame.offset, frame.num_bytes, frame.ticket)
    return body + _mac(key, body)


def unpack(header: bytes, key: bytes, sequence: int) -> Frame:
    """Raises TransferError unless the connection's other end made this header, and made it as number ``sequence``."""
    body = header[: _BODY.size]
    if not hmac.compare_digest(header[_BODY.size :], _mac(key, body)):
        raise TransferError("a frame without the connection's key")
    frame = Frame(*_BODY.unpack(body))
    if frame.sequence != sequence:
        raise TransferError(f"frame {frame.sequence} came where {sequence} was due")
    return frame


def _mac(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_MAC_BYTES).digest()
