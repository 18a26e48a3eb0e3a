"""The hand-off with a real engine on a slowed link: layer by layer against whole chunks, and the reader's own proof.

    python -m services.bench.hand_off [--tokens 1500] [--mb-per-s 80] [--rounds 3] [--transport tcp]

Two applications, one prefill and one decode worker each, differ in `transfer.layerwise` only. Reported: medians of
the time from the first chunk's start to the commit, the time to compute, and what the transfer adds to it. For the
proof the benchmark maps the decode worker's KV memory and watches the first layer of the last chunk's last full block:
the bytes are there before the prefill worker has computed that chunk's last layer. One JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from kvstore.geometry import KVGeometry
from services.bench.stage import free_port, process, wait_ready
from services.config import home, load
from services.engine.shape import kv_geometry, resolve_dtype
from services.protocol.model_card import ModelCard


class Watch(threading.Thread):
    """Notes when one layer of one block in another process's KV memory stops being zero."""

    def __init__(self, service: psutil.Process, geometry: KVGeometry, layer: int, block: int) -> None:
        super().__init__(daemon=True)
        folder = Path(f"/proc/{service.pid}/fd")
        links = [x for x in folder.iterdir() if "memfd:pdray-kv" in os.readlink(x)]
        fd = os.open(links[0], os.O_RDONLY)
        self._map = mmap.mmap(fd, geometry.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        self._at = geometry.offset(0, layer, block)
        self._until_s = time.monotonic() + 60
        self.seen_s = 0.0

    def run(self) -> None:
        while time.monotonic() < self._until_s:
            if any(self._map[self._at : self._at + 64]):
                self.seen_s = time.monotonic()
                return
            time.sleep(0.0005)


@contextlib.contextmanager
def application(folder: Path, model: Path, options: argparse.Namespace, *, layerwise: bool) -> Iterator[Any]:
    """One prefill worker, one decode worker, one router; gives (port, decode worker's service process, geometry)."""
    ports = [free_port() for _ in range(4)]
    settings = {
        "secret": "benchmark",
        "workers": [f"127.0.0.1:{p}" for p in ports[:2]],
        "redis": {"url": "none"},
        "engine": {"num_threads": 1, "max_num_batched_tokens": options.chunk_tokens},
        "transfer": {
            "transport": options.transport,
            "layerwise": layerwise,
            "throttle_bytes_per_s": int(options.mb_per_s * 1e6),
        },
        "router": {"port": ports[2], "grpc_port": ports[3]},
    }
    files = []
    for port in ports[:2]:
        file = folder / f"{layerwise}-{port}.yaml"
        file.write_text(yaml.safe_dump(settings | {"worker": {"port": port}}))
        files.append(file)
    config = load(files[0], environ={})
    geometry = kv_geometry(ModelCard.load(model), config.engine, resolve_dtype(config.model.dtype))
    with (
        process("services.prefill", files[0], model),
        process("services.decode", files[1], model) as decode,
        process("services.router", files[0], model),
    ):
        wait_ready(ports[2])
        yield ports[2], decode, geometry


def call(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply), reply.headers.get("x-request-id", "")


def hand_off(port: int, num_tokens: int, rng: random.Random) -> dict[str, Any]:
    """One fresh prompt; when its first chunk began, when its last layer was computed, when it was committed."""
    prompt = [rng.randrange(1000, 20000) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    _, request_id = call(port, "/v1/completions", body)
    events = call(port, f"/debug/requests/{request_id}")[0]["events"]
    mine = {e["name"]: e for e in events if str(e.get("worker", "")).startswith("prefill")}
    rows: list[list[float]] = mine["pushed"]["detail"]["layers"]
    return {
        "total_ms": mine["committed"]["at_ms"] - mine["prefill_started"]["at_ms"],
        "computed_ms": mine["prefill_done"]["at_ms"] - mine["prefill_started"]["at_ms"],
        "last_layer_computed_s": max(r[2] for r in rows),
        "bytes": int(sum(r[5] for r in rows)),
    }


def run_mode(folder: Path, model: Path, options: argparse.Namespace, *, layerwise: bool) -> dict[str, Any]:
    rng = random.Random(1)
    with application(folder, model, options, layerwise=layerwise) as (port, decode, geometry):
        block = options.tokens // geometry.groups[0].block_size - 1  # a fresh pool hands out blocks from 0 on
        watch = Watch(decode, geometry, layer=0, block=block)
        watch.start()
        first = hand_off(port, options.tokens, rng)
        watch.join(60)
        rounds = [hand_off(port, options.tokens, rng) for _ in range(options.rounds)]
    total, computed = (statistics.median(r[k] for r in rounds) for k in ("total_ms", "computed_ms"))
    return {
        "total_ms_p50": round(total, 1),
        "computed_ms_p50": round(computed, 1),
        "exposed_ms_p50": round(statistics.median(r["total_ms"] - r["computed_ms"] for r in rounds), 1),
        "reader_saw_layer_0_before_last_layer_was_computed_ms": round(
            (first["last_layer_computed_s"] - watch.seen_s) * 1000, 1
        ),
        "bytes": first["bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--mb-per-s", type=float, default=80.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="tcp")
    options = parser.parse_args()
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    result: dict[str, Any] = {"benchmark": "hand_off", **vars(options), "cores": psutil.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        for name, layerwise in (("layer_by_layer", True), ("chunk_by_chunk", False)):
            result[name] = run_mode(Path(folder), model, options, layerwise=layerwise)
    result["link_ms"] = round(result["layer_by_layer"]["bytes"] / (options.mb_per_s * 1e3), 1)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
