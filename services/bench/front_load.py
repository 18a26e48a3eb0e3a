"""What the router's front adds, and whether its event loop ever stands still: many streams at once, then one at a time.

    python -m services.bench.front_load [--streams 500] [--tokens 50] [--cadence-ms 200] [--idle 200]

The router runs in this process, where a task that sleeps 5 ms at a time sees how late it wakes: ``stall_ms`` by the
clock, which counts the times that the system gave the core to others, and ``busy_ms`` by this thread's own CPU time
between two such looks, which does not. Worker (`services.bench.paced`: a token for each stream every cadence) and
clients are processes of their own. ``front_ms`` is a client's time to its first token, connecting included, less what
the worker says that the request lay there, one request after the other on an idle router. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.bench.stage import free_port, process
from services.bench.stream_client import percentile, timed_chat
from services.config import home, load
from services.router.main import Router, start_router

LOOK_S = 0.005
LIMIT_S = 300.0


@dataclass(slots=True)
class Watch:
    """How late a task of the loop woke, and what the loop's thread computed meanwhile; milliseconds."""

    stalls: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    collecting: list[float] = field(default_factory=list)  # pauses of the garbage collector

    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = {"looks": len(self.stalls), "over_100_ms": sum(x > 100 for x in self.stalls)}
        for name, values in (("stall_ms", self.stalls), ("busy_ms", self.busy)):
            told[name] = {"p99": round(percentile(values, 99), 2), "max": round(max(values), 2)}
        return told | {"gc_max_ms": round(max(self.collecting, default=0.0), 2)}


@asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Look at the running loop for as long as the block runs."""
    watch, began_s = Watch(), 0.0

    async def look() -> None:
        while True:
            cpu_s, due_s = time.thread_time(), time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            watch.stalls.append(1000 * (time.perf_counter() - due_s))
            watch.busy.append(1000 * (time.thread_time() - cpu_s))

    def collect(phase: str, _about: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        else:
            watch.collecting.append(1000 * (time.perf_counter() - began_s))

    task = asyncio.create_task(look(), name="look")
    gc.callbacks.append(collect)
    try:
        yield watch
    finally:
        gc.callbacks.remove(collect)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def clients(port: int, streams: int, rounds: int, num_tokens: int) -> list[dict[str, Any]]:
    """Chats as a process of its own sees them: ``streams`` at once, ``rounds`` times."""
    numbers = map(str, (port, streams, rounds, num_tokens))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.bench.front_load", "--as-clients", *numbers, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"the clients ended with {child.returncode}")
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


async def act_as_clients(port: int, streams: int, rounds: int, num_tokens: int) -> None:
    """What `clients` starts."""
    rows = []
    for nth in range(rounds):
        labels = [f"front-{nth}-{i}" for i in range(streams)]
        answers = await asyncio.gather(*(timed_chat("127.0.0.1", port, num_tokens, label) for label in labels))
        rows += [{"label": x, "times_ms": times} for x, times in zip(labels, answers, strict=True)]
    sys.stdout.write(json.dumps(rows))


async def measure(router: Router, streams: int, num_tokens: int) -> dict[str, Any]:
    """``streams`` at once: the loop's stalls while they come and while they run, and what the clients saw."""
    port = router.http_port
    await clients(port, min(streams, 8), 1, 4)  # warm
    gc.collect()
    work = asyncio.create_task(clients(port, streams, 1, num_tokens))
    async with watched() as coming:
        while router.core.flow.active < streams and not work.done():
            await asyncio.sleep(LOOK_S)
    async with watched() as running:
        rows = await work
    gaps = [b - a for row in rows for a, b in zip(row["times_ms"][1:], row["times_ms"][2:], strict=False)]
    whole = sum(len(row["times_ms"]) >= num_tokens for row in rows)
    told = {f"gap_p{p}_ms": round(percentile(gaps, p), 2) for p in (50, 99)}
    return {"streams": streams, "whole": whole, "coming": coming.summary(), "running": running.summary(), **told}


async def idle(router: Router, requests: int) -> dict[str, Any]:
    """One request after the other: what the front adds to the worker's own time."""
    added, firsts = [], []
    for row in await clients(router.http_port, 1, requests, 2):
        shown = router.core.request_debug(row["label"])
        if shown is not None and row["times_ms"]:
            parts = shown["ttft_parts_ms"]
            firsts.append(row["times_ms"][0])
            added.append(firsts[-1] - parts["p_queue"] - parts["kv_load"] - parts["prefill"])
    told = {f"p{p}": round(percentile(added, p), 2) for p in (50, 90, 99)}
    return {"requests": len(added), "ttft_p50_ms": round(percentile(firsts, 50), 2), "front_ms": told}


async def run(file: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both measurements on one router."""
    router = await start_router(load(file), model)
    try:
        async with asyncio.timeout(60):
            while not router.core.ready()[0]:
                await asyncio.sleep(0.05)
        return {
            "idle": await idle(router, options.idle),
            "load": await measure(router, options.streams, options.tokens),
        }
    finally:
        await router.stop(5.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=50, help="of each stream")
    parser.add_argument("--cadence-ms", type=float, default=200.0)
    parser.add_argument("--idle", type=int, default=200, help="requests one after the other")
    parser.add_argument("--as-clients", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_clients:
        asyncio.run(act_as_clients(*options.as_clients))
        return 0
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    result: dict[str, Any] = {
        "benchmark": "front_load",
        "cadence_ms": options.cadence_ms,
        "tokens_per_stream": options.tokens,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
    }
    with tempfile.TemporaryDirectory() as folder:
        file, worker_port = Path(folder) / "config.yaml", free_port()
        tree = {
            "secret": "benchmark",
            "workers": [f"127.0.0.1:{worker_port}"],
            "redis": {"url": "none"},
            "worker": {"port": worker_port},
            "engine": {"max_num_seqs": 2 * options.streams},
            "router": {"port": 0, "grpc_port": 0, "timelines_kept": max(1000, options.idle)},
        }
        file.write_text(yaml.safe_dump(tree))
        with process("services.bench.paced", file, model, "--cadence-ms", str(options.cadence_ms)):
            result |= asyncio.run(run(file, model, options))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
