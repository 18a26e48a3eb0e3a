"""Names of KV blocks: what a block's content depends on, as 16 bytes.

    root = H(tenant salt, model, tokenizer, dtype, block size, layout)
    name₀ = H(root, tokens₀, extra₀) ─► name₁ = H(name₀, tokens₁, extra₁) ─► …

Only full blocks have a name. Two blocks with one name hold the same KV, whichever process computed it: the digest takes
every field with its type and length, and nothing from the process (no ``hash``, no environment variable).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

NAME_BYTES = 16
MAX_TOKEN_ID = 2**32 - 1

_ROOT = b"pdray.root.v1"  # blake2b's personalization keeps roots and blocks apart
_BLOCK = b"pdray.block.v1"
_U32 = struct.Struct("<I")
_NO_EXTRA = _U32.pack(0)


def namespace_root(*, salt: str, model: str, tokenizer: str, dtype: str, block_size: int, layout_version: int) -> bytes:
    """The parent of every first block: unequal arguments share no block.

    Args:
        salt: separates tenants; from the authenticated key, not from the client alone.
        model: fingerprint of the weights.
        tokenizer: fingerprint of the tokenizer.
        dtype: of the KV, a key of ``geometry.ITEMSIZE``.
        block_size: tokens per block.
        layout_version: ``geometry.LAYOUT_VERSION``.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    fields = {
        "salt": salt,
        "model": model,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "block_size": block_size,
        "layout_version": layout_version,
    }
    digest = blake2b(digest_size=NAME_BYTES, person=_ROOT)
    for key, value in fields.items():
        kind = b"i" if isinstance(value, int) else b"s"
        digest.update(_sized(key.encode()) + kind + _sized(str(value).encode("utf-8", "surrogatepass")))
    return digest.digest()


def extend_name(parent: bytes, token_ids: Sequence[int], extra: Sequence[tuple[str, bytes]] = ()) -> bytes:
    """The name of one full block after ``parent``.

    Args:
        parent: name of the block before it, or the namespace root.
        token_ids: [block_size] its tokens; the caller sees to it that the block is full.
        extra: what else the KV depends on, each with its type: ("image", content hash and position), ("adapter", …).
            Their order does not matter.

    Raises:
        ValueError: a parent that is no name, no tokens, or an id outside 0..2³²−1.
    """
    if not len(token_ids):
        raise ValueError("a block without tokens has no name")
    tail = _NO_EXTRA
    if extra:
        tail = _U32.pack(len(extra)) + b"".join(_sized(k.encode()) + _sized(v) for k, v in sorted(extra))
    data = _checked_parent(parent) + _U32.pack(len(token_ids)) + _packed(token_ids) + tail
    return blake2b(data, digest_size=NAME_BYTES, person=_BLOCK).digest()


def block_names(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Names of the ``len(token_ids) // block_size`` full blocks of a text prompt, first block first.

    The last ``len(token_ids) % block_size`` tokens get no name. A prompt with images or an adapter is named block by
    block with `extend_name`. Raises ValueError as `extend_name` does.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    parent = _checked_parent(root)
    step = block_size * _U32.size
    packed = _packed(token_ids)
    size = _U32.pack(block_size)
    names = []
    for start in range(0, len(packed) - step + 1, step):
        data = parent + size + packed[start : start + step] + _NO_EXTRA
        parent = blake2b(data, digest_size=NAME_BYTES, person=_BLOCK).digest()
        names.append(parent)
    return names


def _sized(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _checked_parent(parent: bytes) -> bytes:
    if len(parent) != NAME_BYTES:
        raise ValueError(f"a parent has {NAME_BYTES} bytes, got {len(parent)}")
    return parent


def _packed(token_ids: Sequence[int]) -> bytes:
    """Four little-endian bytes for each id."""
    try:
        ids = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN_ID}") from None
    if ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN_ID):
        raise ValueError(f"token ids must lie in 0..{MAX_TOKEN_ID}, got {ids.min()}..{ids.max()}")
    return ids.astype("<u4").tobytes()
