"""What the reader checks before it decodes: that a commit covers the grant, and that every extent has its digest."""

from __future__ import annotations

import asyncio

from kvstore.transfer import messages as t
from services.decode.inbound import Inbound, check_coverage
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore


async def verify(
    core: WorkerCore, inbound: Inbound, request: worker_pb2.CommitRequest
) -> list[worker_pb2.Extent] | str:
    """Extents whose bytes are not what the writer sent; text where the commit itself is wrong."""
    if not request.first_tokens:
        return "the commit brings no first token"
    if not inbound.resent:
        expected = inbound.block_ids[inbound.cached_blocks :]
        if wrong := check_coverage(core.geometry, expected, request.extents):
            return f"the commit does not cover the grant: {wrong}"
    if not core.config.transfer.digests:
        return []
    inbound.verified = asyncio.get_running_loop().create_future()
    extents = tuple(t.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in request.extents)
    core.send_transfer(t.Verify(ticket_id=inbound.ticket_id, extents=extents))
    try:
        verified = await asyncio.wait_for(inbound.verified, inbound.live.remaining_s(core.clock()))
    except TimeoutError:
        return "the digests were not checked within the request's budget"
    if verified.bad and inbound.resent:
        return f"{len(verified.bad)} extents have a wrong digest after they were sent again"
    return [worker_pb2.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in verified.bad]
