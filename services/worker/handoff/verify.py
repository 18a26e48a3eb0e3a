"""What a reader checks before it uses what landed: that every extent has its digest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvstore.transfer import messages as t
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import Inbound


async def find_bad(
    core: WorkerCore, inbound: Inbound, extents: Iterable[worker_pb2.Extent]
) -> tuple[worker_pb2.Extent, ...]:
    """Extents whose bytes here are not what the writer sent; none where digests are off.

    Raises TimeoutError where they were not checked within the request's budget.
    """
    if not core.config.transfer.digests:
        return ()
    inbound.verified = asyncio.get_running_loop().create_future()
    found = tuple(t.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in extents)
    core.send_transfer(t.Verify(ticket_id=inbound.ticket_id, extents=found))
    verified = await asyncio.wait_for(inbound.verified, inbound.live.remaining_s(core.clock()))
    return tuple(worker_pb2.Extent(layer=e.layer, block=e.block, count=e.count, digest=e.digest) for e in verified.bad)
