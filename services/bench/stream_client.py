"""A streaming client that costs little: it only notes when each chunk of an answer arrived."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any


async def chunk_times(host: str, port: int, num_tokens: int) -> list[float]:
    """Monotonic seconds at which each token's SSE line arrived, of one streamed completion."""
    return await _times(host, port, "/v1/completions", {"prompt": [1000, 1001, 1002], "max_tokens": num_tokens}, "")


async def timed_chat(host: str, port: int, num_tokens: int, label: str) -> list[float]:
    """Milliseconds from before the connection to each token of a streamed chat, which has the id ``label``."""
    started = time.perf_counter()
    body = {"messages": [{"role": "user", "content": "Tell me of the sea. " * 20}], "max_tokens": num_tokens}
    found = await _times(host, port, "/v1/chat/completions", body, label)
    return [round(1000 * (at - started), 3) for at in found[1:]]  # the first chunk of a chat holds its role alone


async def _times(host: str, port: int, path: str, fields: dict[str, Any], label: str) -> list[float]:
    body = json.dumps({"temperature": 0, "ignore_eos": True, "stream": True, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nX-Request-Id: {label}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    times: list[float] = []
    try:
        async with asyncio.timeout(120):
            while line := await reader.readline():
                if line.startswith(b'data: {"'):
                    times.append(time.perf_counter())
                elif line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise RuntimeError(f"the server answered {line.decode().strip()}")
    finally:
        writer.close()
    return times


async def gaps_ms(host: str, port: int, streams: int, num_tokens: int) -> list[float]:
    """Gaps between tokens over ``streams`` answers at once, in milliseconds; the first gap of each is left out."""
    answers = await asyncio.gather(*(chunk_times(host, port, num_tokens) for _ in range(streams)))
    return [(b - a) * 1000 for times in answers for a, b in pairwise(times[1:])]


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]
