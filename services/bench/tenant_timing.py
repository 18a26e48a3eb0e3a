"""Whether time tells a tenant what another has cached: its TTFT on prompts of that one against prompts of nobody.

    python -m services.bench.tenant_timing [--rounds 40] [--tokens 512]

One mixed worker with the default model, and a router with two keys. In each round tenant A sends a new prompt, twice,
so that it is cached; then B sends the same prompt (``others``) and one that nobody has sent (``nobodys``), in random
order, and at last the first one again (``own``), which shows that a hit would be seen. ``p_value``: how often medians
of randomly dealt labels lie as far apart, two-sided; without a leak it is any number from 0 to 1. One JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.bench.stage import free_port, process, wait_ready
from services.config import home
from services.router.access.keys import new_key, sha256_of

DEALS = 4000
LIMIT_S = 120.0


def ttft_ms(port: int, key: str, prompt: Sequence[int]) -> float:
    """Of one streamed completion on a connection of its own. Raises RuntimeError for another status than 200."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", body, headers)
        reply = connection.getresponse()
        reply.readline()
        spent_ms = 1000 * (time.perf_counter() - started)
        rest = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"the router answered {reply.status}: {rest[:200]!r}")
    finally:
        connection.close()
    return spent_ms


def p_value(first: Sequence[float], second: Sequence[float], rng: random.Random) -> float:
    """Permutation test of the difference of two medians."""
    seen = abs(statistics.median(first) - statistics.median(second))
    values, hits = [*first, *second], 0
    for _ in range(DEALS):
        rng.shuffle(values)
        dealt = abs(statistics.median(values[: len(first)]) - statistics.median(values[len(first) :]))
        hits += dealt >= seen
    return (hits + 1) / (DEALS + 1)


def measure(port: int, keys: tuple[str, str], rounds: int, tokens: int) -> dict[str, Any]:
    """``keys``: of tenants A and B."""
    rng = random.Random(1)

    def prompt() -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(tokens)]

    times: dict[str, list[float]] = {"others": [], "nobodys": [], "own": []}
    for _ in range(3):
        ttft_ms(port, keys[1], prompt())  # warm
    for _ in range(rounds):
        known = prompt()
        for _ in range(2):
            ttft_ms(port, keys[0], known)
        asked = [("others", known), ("nobodys", prompt())]
        rng.shuffle(asked)
        for name, ids in asked:
            times[name].append(ttft_ms(port, keys[1], ids))
        times["own"].append(ttft_ms(port, keys[1], known))
    medians = {f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()}
    return {
        **medians,
        "p_value": round(p_value(times["others"], times["nobodys"], rng), 4),
        "p_value_of_own": round(p_value(times["own"], times["nobodys"], rng), 4),
    }


def run(folder: Path, model: Path, rounds: int, tokens: int) -> dict[str, Any]:
    """Start both processes and measure."""
    worker_port, port = free_port(), free_port()
    keys = (new_key(), new_key())
    entries = [{"name": name, "hash": sha256_of(key)} for name, key in zip(("a", "b"), keys, strict=True)]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    tree = {
        "secret": "benchmark",
        "workers": [f"127.0.0.1:{worker_port}"],
        "redis": {"url": "none"},
        "worker": {"port": worker_port},
        "access": {"keys_file": str(folder / "keys.yaml")},
        "router": {"port": port, "grpc_port": 0},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    with process("services.decode", file, model, "--role", "mixed"), process("services.router", file, model):
        wait_ready(port)
        return measure(port, keys, rounds, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    options = parser.parse_args()
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    result: dict[str, Any] = {
        "benchmark": "tenant_timing",
        "rounds": options.rounds,
        "tokens": options.tokens,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
    }
    with tempfile.TemporaryDirectory() as folder:
        result |= run(Path(folder), model, options.rounds, options.tokens)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
