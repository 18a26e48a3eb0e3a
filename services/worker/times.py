"""Where the time of a worker that gives the whole answer went, for the timeline."""

from __future__ import annotations

from services.engine import messages as m
from services.protocol.proto import worker_pb2
from services.worker.live import LiveRequest


def stage_times(live: LiveRequest, output: m.SequenceOutput, now: float) -> worker_pb2.StageTimes | None:
    """With token 1 and with the end: where this worker's time went, from its own clock."""
    first = output.position == 0
    if not first and not output.finish_reason:
        return None
    start_s = live.started_s or live.accepted_s
    total_ms = (now - start_s) * 1000
    compute_ms = min(output.compute_ms, total_ms)
    if live.started_s:
        return worker_pb2.StageTimes(wait_ms=total_ms - compute_ms, compute_ms=compute_ms)
    return worker_pb2.StageTimes(queue_ms=total_ms - compute_ms, compute_ms=compute_ms)
