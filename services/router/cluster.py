"""What /v1/cluster shows: the router's view in plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.transfer.several import first_common
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
    "pulls",
    "pulls_failed",
    "pulled_blocks",
)


def cluster_dict(view: View, fleet: Fleet, redis_mode: str, model: str) -> dict[str, Any]:
    """Workers by id; an address behind which no worker has been seen is listed under its own name."""
    workers = [_worker(entry) for entry in view.entries()]
    workers += [_unknown(link.address, link.last_error) for link in fleet.unknown()]
    return {"redis": {"mode": redis_mode}, "models": [model], "workers": workers, "pairs": pairs_of(view.entries())}


def pairs_of(entries: Sequence[WorkerEntry]) -> list[dict[str, str]]:
    """By what each prefill worker hands off to each decode worker, or why it does not."""
    here = [e for e in entries if e.link_state is not WorkerState.LOST]
    readers = [e for e in here if e.role == "decode"]
    return [_pair(writer, reader) for writer in here if writer.role == "prefill" for reader in readers]


def _pair(writer: WorkerEntry, reader: WorkerEntry) -> dict[str, str]:
    pair = {"prefill": writer.worker_id, "decode": reader.worker_id, "transport": "", "note": ""}
    if reason := writer.refusal or reader.refusal:
        return pair | {"note": reason}
    there, here = ((e.transport, *e.registration.spare_transports) for e in (writer, reader))
    notes = dict.fromkeys(e.registration.transport_note for e in (writer, reader))
    return pair | {"transport": first_common(there, here), "note": "; ".join(note for note in notes if note)}


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
        "transport_note": e.registration.transport_note,
        "running": load.running,
        "waiting": load.waiting,
        "step": load.step,
        "step_ms": load.step_ms,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "kv_unused_tokens": load.kv_unused_tokens,
        "kv_unwritten_blocks": load.kv_unwritten_blocks,
        "blocks": {name: getattr(load, f"blocks_{name}") for name in BLOCK_FIELDS},
        "known_blocks": len(e.residency),
        "cached_by_source": dict(load.cached_by_source),
        "transfer_failures": dict(load.transfer_failures),
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
        "transport_note": "",
        "running": 0,
        "waiting": 0,
        "step": 0,
        "step_ms": 0.0,
        "prefill_tokens_per_s": 0.0,
        "blocks": dict.fromkeys(BLOCK_FIELDS, 0),
        "known_blocks": 0,
        "cached_by_source": {},
        "transfer_failures": {},
        **dict.fromkeys(COUNTER_FIELDS, 0),
    }
