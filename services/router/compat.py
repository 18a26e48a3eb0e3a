"""Which workers may exchange KV: a pure comparison of fingerprints.

One kind of worker serves at a time. The first kind to register is the reference; a worker of another kind is refused,
with a reason that names both values, until the last worker of the reference has left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.blocks import namespace_root
from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry
from kvstore.transfer.several import first_common
from services.protocol.proto import worker_pb2
from services.protocol.version import PROTOCOL_VERSION, apart


@dataclass(frozen=True, slots=True)
class Kind:
    """What two workers must have in common; the number of blocks is each worker's own."""

    model: str
    tokenizer: str
    dtype: str
    block_size: int
    layout_version: int
    groups: str  # JSON of the KV groups: layers, heads, head size, dtype
    token_bytes: int  # KV of one token over all layers
    num_layers: int

    def root(self, salt: str) -> bytes:
        """Parent of the first block of every prompt under this salt."""
        return namespace_root(
            salt=salt,
            model=self.model,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            block_size=self.block_size,
            layout_version=self.layout_version,
        )


def kind_of(fingerprint: worker_pb2.Fingerprint) -> Kind:
    """Raises ConfigError where the geometry cannot be read or the block sizes contradict each other."""
    try:
        geometry = KVGeometry.from_dict(json.loads(fingerprint.geometry_json))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"the fingerprint's geometry is unreadable: {exc}") from None
    sizes = {g.block_size for g in geometry.groups}
    if sizes != {fingerprint.block_size}:
        raise ConfigError(f"block_size is {fingerprint.block_size}, but the geometry has {sorted(sizes)}")
    return Kind(
        model=fingerprint.model,
        tokenizer=fingerprint.tokenizer,
        dtype=fingerprint.dtype,
        block_size=fingerprint.block_size,
        layout_version=fingerprint.layout_version,
        groups=json.dumps(geometry.to_dict()["groups"], sort_keys=True),
        token_bytes=sum(g.token_bytes for g in geometry.groups),
        num_layers=sum(g.num_layers for g in geometry.groups),
    )


def difference(there: Kind, here: Kind, there_name: str, here_name: str) -> str:
    """The first field that keeps two kinds apart, with both values; "" where they are the same."""
    for name in ("model", "tokenizer", "dtype", "block_size", "layout_version"):
        a, b = getattr(there, name), getattr(here, name)
        if a != b:
            return f"{name} differs: {a} on {there_name}, {b} on {here_name}"
    if there.groups != here.groups:
        return _group_difference(json.loads(there.groups), json.loads(here.groups), there_name, here_name)
    return ""


def _group_difference(there: list[dict[str, Any]], here: list[dict[str, Any]], there_name: str, here_name: str) -> str:
    if len(there) != len(here):
        return f"kv groups differ: {len(there)} on {there_name}, {len(here)} on {here_name}"
    for i, (a, b) in enumerate(zip(there, here, strict=True)):
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                return f"kv group {i}: {name} differs: {a.get(name)} on {there_name}, {b.get(name)} on {here_name}"
    return ""


@dataclass(frozen=True, slots=True)
class Member:
    """One worker that is there, in the order of registration."""

    worker_id: str
    kind: Kind
    transport: str = ""  # "" for a worker that hands nothing off
    spares: tuple[str, ...] = ()  # transports that run beside it
    protocol: int = PROTOCOL_VERSION

    @property
    def transports(self) -> tuple[str, ...]:
        return (self.transport, *self.spares) if self.transport else ()


def refusals(members: Sequence[Member], model: str = "", tokenizer: str = "") -> dict[str, str]:
    """Why each refused worker is refused.

    Args:
        members: workers that are there, first registered first.
        model, tokenizer: fingerprints of the router's own model card, which outrank any worker's; "" = not known.
    """
    reasons: dict[str, str] = {}
    reference: Member | None = None
    carrier: Member | None = None  # the reference for the transport
    shared: tuple[str, ...] = ()  # transports that all have who hand off and are not refused
    taken: list[Member] = []  # whoever is not refused
    for member in members:
        why = _not_ours(member, model, tokenizer)
        if not why and reference is not None:
            why = difference(reference.kind, member.kind, reference.worker_id, member.worker_id)
            why = why or next(filter(None, (_versions_apart(member, other) for other in taken)), "")
        if not why and member.transport and carrier is not None and not first_common(shared, member.transports):
            there, here = (
                f"{_either(shared)} on {carrier.worker_id}",
                f"{_either(member.transports)} on {member.worker_id}",
            )
            why = f"transport differs: {there}, {here}"
        if why:
            reasons[member.worker_id] = why
            continue
        reference = reference or member
        taken.append(member)
        if member.transport:
            shared = tuple(x for x in shared if x in member.transports) if carrier else member.transports
            carrier = carrier or member
    return reasons


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _not_ours(member: Member, model: str, tokenizer: str) -> str:
    for name, ours in (("model", model), ("tokenizer", tokenizer)):
        theirs = getattr(member.kind, name)
        if ours and theirs != ours:
            return f"{name} differs: {ours} on the router, {theirs} on {member.worker_id}"
    return apart(member.protocol, PROTOCOL_VERSION, member.worker_id, "the router")


def _versions_apart(member: Member, other: Member) -> str:
    return apart(member.protocol, other.protocol, member.worker_id, other.worker_id)
