"""What a run must know of a server before it starts, and what a pdray tells after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.client import COMPLETIONS
from services.bench.load.http import HttpError, Pool, Reply, quietly
from services.bench.load.prompts import IdRange

READY_PAUSE_S = 0.5
PROBE_S = 60.0
MAX_PHASES = 1000  # requests whose phases are fetched; pdray keeps the last 1,024 by default
RANGES = (IdRange(1000, 32000), IdRange(250, 8000), IdRange(64, 500), IdRange(32, 250))
"""Tried in this order, by the highest id of each: a server refuses ids that its vocabulary lacks."""


@dataclass(frozen=True, slots=True)
class Server:
    model: str
    is_pdray: bool


async def find_server(pool: Pool, model: str | None, timeout_s: float) -> Server:
    """Wait until /v1/models answers, and choose the model.

    Raises:
        ConfigError: no answer in time; or several models, and none was named.
    """
    models = await _models(pool, timeout_s)
    names = [str(entry.get("id")) for entry in models]
    if model is None:
        if len(names) != 1:
            raise ConfigError(f"--model is needed: the server has {', '.join(names) or 'no list of models'}")
        model = names[0]
    owner = next((entry.get("owned_by") for entry in models if entry.get("id") == model), None)
    return Server(model, owner == "pdray")


async def _models(pool: Pool, timeout_s: float) -> list[dict[str, Any]]:
    deadline_s = pool.clock() + timeout_s
    while True:
        try:
            async with asyncio.timeout(max(5.0, deadline_s - pool.clock())):
                reply = await pool.get("/v1/models")
            if reply.status < 500:
                return _entries(reply)
            seen = f"HTTP {reply.status}"
        except (HttpError, TimeoutError) as exc:
            seen = str(exc) or "no answer"
        if pool.clock() >= deadline_s:
            raise ConfigError(f"the server is not ready after {timeout_s:g} s: {seen}")
        await asyncio.sleep(READY_PAUSE_S)


def _entries(reply: Reply) -> list[dict[str, Any]]:
    try:
        data = json.loads(reply.body)["data"]
        return [entry for entry in data if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []


async def find_ids(pool: Pool, model: str) -> IdRange | None:
    """Token ids that the server takes as a prompt of /v1/completions; None where it takes none."""
    for ids in RANGES:
        body = json.dumps({"model": model, "prompt": [ids.high - 1], "max_tokens": 1}).encode()
        try:
            async with asyncio.timeout(PROBE_S):
                reply = await pool.ask(pool.target.request("POST", COMPLETIONS, pool.headers, body))
        except (HttpError, TimeoutError):
            return None
        if reply.status == 200:
            return ids
        if reply.status in (401, 403, 404):
            return None
    return None


def tokenizer_ids(path: Path) -> IdRange:
    """Ids of a tokenizer.json (or a folder with one), above its special tokens at the low end.

    Raises:
        ConfigError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        size = len(data["model"]["vocab"])
        low_specials = {entry["id"] for entry in data.get("added_tokens", ()) if entry["id"] < size // 2}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"--tokenizer {path}: {type(exc).__name__} {exc}") from None
    high = min([size, *(e["id"] for e in data.get("added_tokens", ()) if e["id"] >= size // 2)])
    return IdRange(max(low_specials, default=-1) + 1, high)


async def server_phases(pool: Pool, answer_ids: Sequence[str]) -> dict[str, Any] | None:
    """Where pdray says the time of these requests went: for each part its mean, p50 and p99 in ms.

    None where it kept none of them. The parts of TTFT add up to the server's own TTFT, request by request.
    """
    parts: dict[str, list[float]] = {}
    requests = 0
    for answer_id in answer_ids[-MAX_PHASES:]:
        reply = await quietly(pool, f"/debug/requests/{answer_id}")
        if reply is None:
            break  # the server is gone, or does not answer in time
        found = _parts(reply)
        requests += bool(found)
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    if not requests:
        return None
    return {
        "requests": requests,
        "parts_ms": {
            name: {
                "mean": round(float(np.mean(values)), 3),
                "p50": round(float(np.percentile(values, 50)), 3),
                "p99": round(float(np.percentile(values, 99)), 3),
            }
            for name, values in parts.items()
        },
    }


def _parts(reply: Reply) -> dict[str, float]:
    """Milliseconds by part; none where the request is not known any more."""
    try:
        data = json.loads(reply.body)
        return {k: float(v) for k, v in {**data["ttft_parts_ms"], **data["rest_parts_ms"]}.items()}
    except (ValueError, KeyError, TypeError):
        return {}
