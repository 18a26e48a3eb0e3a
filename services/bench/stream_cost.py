"""What a streamed token costs between engine and client: the router's own port against Serve's proxy, in one run.

    python -m services.bench.stream_cost [--tokens 200] [--streams 1,16,64] [--skip-serve]

A paced worker (`services.bench.paced`) gives each stream a token every 20 ms. Reported for each path and number of
streams: CPU microseconds per token in worker, router and Serve's proxy, and the p50 and p99 gap that the client sees
beyond the cadence. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.bench.stage import free_port, process, wait_ready
from services.bench.stream_client import gaps_ms, percentile
from services.config import ServeConfig, home, load

CADENCE_MS = 20.0


def measure(port: int, streams: int, num_tokens: int, watched: dict[str, psutil.Process]) -> dict[str, float]:
    """One load: gaps at the client, CPU in the watched processes."""
    asyncio.run(gaps_ms("127.0.0.1", port, min(streams, 4), 10))  # warm
    before = {name: sum(p.cpu_times()[:2]) for name, p in watched.items()}
    gaps = asyncio.run(gaps_ms("127.0.0.1", port, streams, num_tokens))
    tokens = streams * num_tokens
    row = {f"{n}_cpu_us": (sum(p.cpu_times()[:2]) - before[n]) / tokens * 1e6 for n, p in watched.items()}
    row |= {f"gap_p{p}_ms": percentile(gaps, p) for p in (50, 99)}
    row["added_p99_ms"] = row["gap_p99_ms"] - CADENCE_MS
    return {name: round(value, 2) for name, value in row.items()}


def over_serve(config: ServeConfig, model: Path, loads: list[int], num_tokens: int, worker: psutil.Process) -> Any:
    """The same loads through Serve's HTTP proxy, with the router as a replica."""
    from services.app import Cluster, router_only

    cluster = Cluster()
    try:
        cluster.start(config, dashboard=False)
        cluster.deploy(router_only(config, model))
        wait_ready(config.router.serve_port)
        named = {name: p for name, p in _ray_processes().items() if p is not None}
        watched = {"worker": worker, **named}
        return {str(n): measure(config.router.serve_port, n, num_tokens, watched) for n in loads}
    finally:
        cluster.stop()


def _ray_processes() -> dict[str, psutil.Process | None]:
    found: dict[str, psutil.Process | None] = {"router": None, "proxy": None}
    for p in psutil.Process().children(recursive=True):
        title = " ".join(p.cmdline())
        if "ServeReplica" in title and "router" in title:
            found["router"] = p
        elif "ProxyActor" in title:
            found["proxy"] = p
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--skip-serve", action="store_true")
    options = parser.parse_args()
    loads = [int(x) for x in options.streams.split(",")]
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        result = _run(Path(folder), model, loads, options.tokens, serve=not options.skip_serve)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _run(folder: Path, model: Path, loads: list[int], num_tokens: int, *, serve: bool) -> dict[str, Any]:
    worker_port, port = free_port(), free_port()
    file = folder / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "secret": "benchmark",
                "workers": [f"127.0.0.1:{worker_port}"],
                "prefill": 0,
                "decode": 0,
                "mixed": 1,
                "redis": {"url": "none"},
                "worker": {"port": worker_port},
                "router": {"port": port, "grpc_port": 0, "serve_port": free_port(), "serve_grpc_port": free_port()},
            }
        )
    )
    result: dict[str, Any] = {
        "benchmark": "stream_cost",
        "cadence_ms": CADENCE_MS,
        "tokens_per_stream": num_tokens,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
    }
    with process("services.bench.paced", file, model, "--cadence-ms", str(CADENCE_MS)) as worker:
        with process("services.router", file, model) as router:
            wait_ready(port)
            watched = {"worker": worker, "router": router}
            result["direct"] = {str(n): measure(port, n, num_tokens, watched) for n in loads}
        if serve:
            result["serve"] = over_serve(load(file, {"router.port": 0}), model, loads, num_tokens, worker)
    return result


if __name__ == "__main__":
    sys.exit(main())
