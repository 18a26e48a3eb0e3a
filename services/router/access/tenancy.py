"""The salt of a request's blocks: who owns them, and what the client calls apart.

    salt = H(len tenant, tenant, len cache_salt, cache_salt)

Lengths stand before the texts, so that no two pairs meet; a client's own text is never a salt as it is, so nobody can
name another tenant's. What else keeps blocks apart (model, adapter, image) has fields of its own in a block's name.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

_PERSON = b"pdray.salt.v1"
_SIZE = struct.Struct("<Q")


def block_salt(tenant: str, cache_salt: str) -> str:
    """The salt under which a request's blocks are named; "" where there is neither.

    Args:
        tenant: of the authenticated key.
        cache_salt: the client's.
    """
    if not tenant and not cache_salt:
        return ""
    digest = blake2b(digest_size=32, person=_PERSON)
    for text in (tenant, cache_salt):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(_SIZE.pack(len(data)) + data)
    return digest.hexdigest()
