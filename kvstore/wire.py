"""Typed messages between processes of one worker: frozen dataclasses as msgpack, framed by a length.

No pickle, no types but those that a codec was given, and a cap on the size of a frame.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_TYPED = 1  # msgpack extension code of a dataclass


class WireError(ValueError):
    """Bytes that no codec of ours wrote."""


class Codec:
    """Encodes instances of the given dataclasses, which may hold one another, tuples and plain values."""

    def __init__(self, types: Iterable[type[Any]]) -> None:
        self._types = {cls.__name__: cls for cls in types}
        self._fields = {n: [f.name for f in dataclasses.fields(cls)] for n, cls in self._types.items()}

    def encode(self, message: Any) -> bytes:
        data: bytes = msgpack.packb(message, default=self._plain)
        return data

    def decode(self, data: bytes) -> Any:
        """Raises WireError on anything that is not one whole message of these types."""
        try:
            return msgpack.unpackb(data, ext_hook=self._rich, use_list=False, strict_map_key=False)
        except WireError:
            raise
        except Exception as exc:  # msgpack raises many kinds, all of them mean the same here
            raise WireError(f"undecodable message of {len(data)} bytes: {exc}") from None

    def frame(self, message: Any) -> bytes:
        body = self.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        return _LENGTH.pack(len(body)) + body

    def _plain(self, value: Any) -> Any:
        name = type(value).__name__
        if name not in self._types:
            raise TypeError(f"cannot send a {name}")
        body = msgpack.packb([name, *(getattr(value, f) for f in self._fields[name])], default=self._plain)
        return msgpack.ExtType(_TYPED, body)

    def _rich(self, code: int, data: bytes) -> Any:
        if code != _TYPED:
            raise WireError(f"unknown extension type {code}")
        parts = msgpack.unpackb(data, ext_hook=self._rich, use_list=False, strict_map_key=False)
        name, values = parts[0], parts[1:]
        if name not in self._types or len(values) != len(self._fields[name]):
            raise WireError(f"unknown message {name!r} with {len(values)} fields")
        return self._types[name](**dict(zip(self._fields[name], values, strict=True)))


class Deframer:
    """Turns a byte stream back into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each body that ``data`` completes. Raises WireError on a length over the cap."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
