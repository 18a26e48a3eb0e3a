"""What the reader checks before it decodes: that a commit covers the grant, and that every extent has its digest."""

from __future__ import annotations

from collections.abc import Sequence

from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from services.worker.handoff.inbound import Inbound, check_coverage
from services.worker.handoff.verify import find_bad


async def verify(
    core: WorkerCore, inbound: Inbound, request: worker_pb2.CommitRequest
) -> Sequence[worker_pb2.Extent] | str:
    """Extents whose bytes are not what the writer sent; text where the commit itself is wrong."""
    if not request.first_tokens:
        return "the commit brings no first token"
    if not inbound.resent:
        expected = inbound.block_ids[inbound.cached_blocks :]
        if wrong := check_coverage(core.geometry, expected, request.extents):
            return f"the commit does not cover the grant: {wrong}"
    elif left_out := inbound.bad - {(e.layer, e.block, e.count) for e in request.extents}:
        return f"the second commit leaves out {len(left_out)} of {len(inbound.bad)} extents that were bad"
    try:
        bad = await find_bad(core, inbound, request.extents)
    except TimeoutError:
        return "the digests were not checked within the request's budget"
    if bad and inbound.resent:
        return f"{len(bad)} extents have a wrong digest after they were sent again"
    return bad
