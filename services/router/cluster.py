"""What /v1/cluster shows: the router's view in plain data."""

from __future__ import annotations

from typing import Any

from services.router.fleet import Fleet
from services.router.member import WorkerEntry, WorkerState
from services.router.view import View

BLOCK_FIELDS = ("total", "free", "used", "cached", "reserved", "quarantined")
COUNTER_FIELDS = (
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "tokens_generated",
    "tokens_forwarded",
    "decode_tokens_forwarded",
    "tokens_recomputed",
    "preemptions",
    "output_mispredictions",
    "admissions_held_back",
)


def cluster_dict(view: View, fleet: Fleet, redis_mode: str, model: str) -> dict[str, Any]:
    """Workers by id; an address behind which no worker has been seen is listed under its own name."""
    workers = [_worker(entry) for entry in view.entries()]
    workers += [_unknown(link.address, link.last_error) for link in fleet.unknown()]
    return {"redis": {"mode": redis_mode}, "models": [model], "workers": workers}


def _worker(e: WorkerEntry) -> dict[str, Any]:
    load = e.load
    row: dict[str, Any] = {
        "worker_id": e.worker_id,
        "role": e.role,
        "epoch": e.epoch,
        "pid": e.registration.pid,
        "node": e.registration.node,
        "state": str(e.state),
        "reason": e.reason,
        "address": e.address,
        "transport": e.registration.transport,
        "running": load.running,
        "waiting": load.waiting,
        "step": load.step,
        "step_ms": load.step_ms,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "kv_unused_tokens": load.kv_unused_tokens,
        "kv_unwritten_blocks": load.kv_unwritten_blocks,
        "blocks": {name: getattr(load, f"blocks_{name}") for name in BLOCK_FIELDS},
        "known_blocks": len(e.residency),
    }
    if not load.blocks_total:
        row["blocks"]["total"] = row["blocks"]["free"] = e.registration.num_blocks
    return row | {name: getattr(load, name) for name in COUNTER_FIELDS}


def _unknown(address: str, reason: str) -> dict[str, Any]:
    return {
        "worker_id": address,
        "role": "",
        "epoch": "",
        "pid": 0,
        "node": "",
        "state": str(WorkerState.CONNECTING),
        "reason": reason,
        "address": address,
        "transport": "",
        "running": 0,
        "waiting": 0,
        "step": 0,
        "step_ms": 0.0,
        "prefill_tokens_per_s": 0.0,
        "blocks": dict.fromkeys(BLOCK_FIELDS, 0),
        "known_blocks": 0,
        **dict.fromkeys(COUNTER_FIELDS, 0),
    }
