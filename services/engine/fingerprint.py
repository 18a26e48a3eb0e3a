"""Digests that tell whether two workers hold the same weights and the same tokenizer, in well under a second."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from kvstore.errors import ConfigError

EDGE_BYTES = 64 << 10
"""Read from the head and from the tail of each tensor."""
_MAX_HEADER_BYTES = 100 << 20


def read_header(file: BinaryIO, path: Path) -> tuple[bytes, dict[str, Any]]:
    """The JSON header of a safetensors file, raw and parsed without its metadata; leaves the file at the first tensor.

    Raises:
        ConfigError: not a safetensors file.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise ConfigError(f"model.path: {path} is no safetensors file: its header would have {length} bytes")
    raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        offsets = [entry["data_offsets"] for entry in header.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"model.path: {path} has a broken safetensors header: {exc}") from None
    end = max((int(stop) for _, stop in offsets), default=0)
    size = path.stat().st_size
    if size != 8 + length + end:
        raise ConfigError(
            f"model.path: {path} has {size} bytes, its header announces {8 + length + end}: is it cut off?"
        )
    return raw, header


def model_fingerprint(files: list[Path]) -> str:
    """Hex digest over header, sizes, and 64 KiB of head and tail of each tensor, in the order of the tensors' names.

    The middle of a large tensor is not read: this tells models apart, it does not prove bytes intact.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(files):
        with path.open("rb") as file:
            raw, header = read_header(file, path)
            start = 8 + len(raw)
            digest.update(len(raw).to_bytes(8, "little") + raw)
            for name in sorted(header):
                first, last = header[name]["data_offsets"]
                file.seek(start + first)
                digest.update((last - first).to_bytes(8, "little") + file.read(min(EDGE_BYTES, last - first)))
                if last - first > EDGE_BYTES:
                    file.seek(start + last - EDGE_BYTES)
                    digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Hex digest of a small file."""
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def large_file_key(path: Path) -> str:
    """Hex digest of size, first and last MiB: names a cache entry for a file too large to read whole."""
    size = path.stat().st_size
    digest = blake2b(size.to_bytes(8, "little"), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read(1 << 20))
    return digest.hexdigest()
