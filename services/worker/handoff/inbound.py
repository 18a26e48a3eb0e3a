"""The reader's side of tickets: one record each, and the writers that they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.geometry import LAYOUT_VERSION, KVGeometry
from kvstore.transfer import messages as t
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.handoff import HandoffState, advance
from services.protocol.proto import worker_pb2
from services.protocol.version import apart
from services.worker.core import WorkerCore
from services.worker.live import LiveRequest

WriterKey = tuple[str, str]  # worker id, epoch


@dataclass(slots=True)
class Inbound:
    """One ticket of a writer, until what it brought is in use or its blocks are free again.

    ``on_end``: (ticket, reason, fenced): its writer is lost, or has left it out of its lists.
    """

    core: WorkerCore
    live: LiveRequest
    ticket_id: str
    writer: WriterKey
    on_end: Callable[[Inbound, str, bool], None]
    trusts_lists: bool = True  # a list of the writer that leaves the ticket out means that it is over there
    prefix: str = ""  # of its arrows' names in the timeline
    state: HandoffState = HandoffState.REQUESTED
    reserved: asyncio.Future[m.Reserved] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    verified: asyncio.Future[t.Verified] | None = None
    block_ids: tuple[int, ...] = ()
    cached_blocks: int = 0
    transport: str = ""  # that the writer comes by; empty: our own
    resent: bool = False
    bad: frozenset[tuple[int, int, int]] = frozenset()  # (layer, block, count) of what had to be sent again
    last_list: int = 0  # of the writer's lease lists, the last one that could not name this ticket
    commit: asyncio.Task[worker_pb2.CommitReply] | None = None

    def move(self, to: HandoffState, **detail: Any) -> None:
        """Along one arrow of the table; the request's timeline gets the arrow's name."""
        arrow = advance(self.state, to)
        self.state = to
        self.core.emit_event(self.live, self.prefix + arrow, side="reader", ticket=self.ticket_id, **detail)


def check_fingerprint(ours: worker_pb2.Fingerprint, theirs: worker_pb2.Fingerprint) -> None:
    """Raise RequestError INCOMPATIBLE_WORKERS, naming both values, where KV of the writer means nothing here."""
    if why := apart(theirs.protocol_version, ours.protocol_version, "the other worker", "this one"):
        raise RequestError(ErrorCode.INCOMPATIBLE_WORKERS, why)
    for name in ("model", "tokenizer", "dtype", "block_size", "layout_version"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise RequestError(
                ErrorCode.INCOMPATIBLE_WORKERS,
                f"prefill and decode worker differ in {name}: {other!r} there, {mine!r} here; "
                "both must load the same model with the same dtype and block size",
            )
    assert ours.layout_version == LAYOUT_VERSION


def check_coverage(geometry: KVGeometry, expected_blocks: Sequence[int], extents: Iterable[worker_pb2.Extent]) -> str:
    """Empty where the extents name each expected block in each layer once, and no other; else what is wrong."""
    expected = set(expected_blocks)
    num_layers = sum(g.num_layers for g in geometry.groups)
    seen: list[set[int]] = [set() for _ in range(num_layers)]
    for extent in extents:
        if extent.layer >= num_layers:
            return f"layer {extent.layer} of {num_layers}"
        for block in range(extent.block, extent.block + extent.count):
            if block not in expected:
                return f"block {block} was not granted"
            if block in seen[extent.layer]:
                return f"block {block} of layer {extent.layer} came twice"
            seen[extent.layer].add(block)
    for layer, blocks in enumerate(seen):
        if blocks != expected:
            return f"layer {layer} has {len(blocks)} of {len(expected)} blocks"
    return ""
