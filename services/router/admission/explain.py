"""Why a request went where it went, as one short line for a response header; /debug/requests/{id} has all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

ASKED = b"x-pdray-explain"
HEADER = b"x-pdray-decision"
MAX_BYTES = 2048
_TERMS = ("queue_ms", "load_ms", "compute_ms", "transfer_ms", "admission_ms", "pressure_ms", "delay_ms",
          "copy_ms")  # fmt: skip


def is_asked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the request has ``X-PDRay-Explain: 1``."""
    return any(name == ASKED and value.strip() in (b"1", b"true") for name, value in headers)


def decision_header(shown: dict[str, Any] | None) -> bytes:
    """ASCII JSON of at most `MAX_BYTES`: the pair, its cost by terms, the runner-up, and what was promised.

    Args:
        shown: body of /debug/requests/{id}; None, or a request without a decision, gives ``{}``.
    """
    attempts = [a for a in (shown or {}).get("attempts", ()) if a["decision"]]
    if not shown or not (attempts or shown.get("promise")):
        return b"{}"
    told: dict[str, Any] = {"promise": shown.get("promise"), "attempts": len(shown["attempts"])}
    if attempts:
        decision = attempts[-1]["decision"]
        candidates = decision["candidates"]
        chosen = next((c for c in candidates if _is_of(c, attempts[-1])), candidates[0])
        others = [c for c in candidates if c is not chosen]
        told |= {
            "policy": decision["policy"],
            "prefill": attempts[-1]["prefill"],
            "decode": attempts[-1]["decode"],
            "cost_ms": chosen["cost_ms"],
            "terms": {k: chosen[k] for k in _TERMS if chosen.get(k)},
            "considered": decision["considered"],
            "next": {k: others[0][k] for k in ("prefill", "decode", "cost_ms")} if others else None,
        }
    line = json.dumps(told, separators=(",", ":")).encode("ascii")
    return line if len(line) <= MAX_BYTES else b"{}"


def _is_of(candidate: dict[str, Any], attempt: dict[str, Any]) -> bool:
    return bool(candidate["prefill"] == attempt["prefill"] and candidate["decode"] == attempt["decode"])
