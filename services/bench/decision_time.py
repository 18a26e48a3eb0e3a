"""What a routing decision costs with a full view: time by prompt, workers and blocks, memory of a block, naming.

    python -m services.bench.decision_time [--blocks 5000000] [--plot FILE.svg]

Half of the workers prefill and half decode. Each holds an equal share of the indexed blocks: whole conversations of
2,048 blocks behind a system prompt of 64 that all share. Prompts are such conversations, cut or gone on to the wanted
length; the share of workers that holds some of a prompt beyond the system prompt is --holders. A decision is the depth
on each worker (`depths`) and the choice of a pair (`choose`), timed apart, as CPU time of this thread.
One line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from kvstore.blocks import NAME_BYTES, block_names
from services.router.loads import LoadCost
from services.router.policy import Fabric, Prompt, Worker, choose
from services.router.residency import Residency, depths

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 64
CONVERSATION_BLOCKS = 2048
LONG_BLOCKS = 10_000
"""What is asked about most: a prompt of so many blocks, among 64 workers that hold five million."""
PROMPTS = (100, 300, 1000, 3000, LONG_BLOCKS)
WORKERS = (4, 8, 16, 32, 64)
BLOCKS = (50_000, 150_000, 500_000, 1_500_000, 5_000_000)
BATCH = 4096
TOKEN_BYTES, LAYERS = 320 << 10, 80  # of a 70B model
BYTES_PER_S = 1e9  # from worker to worker
LEARNED = 0.1
"""Share of the ways between two workers that have been used lately."""


def digests(rng: random.Random, count: int) -> list[bytes]:
    """Stand for names: as evenly spread, and much faster to make."""
    packed = rng.randbytes(count * NAME_BYTES)
    return [packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)]


class Cluster:
    """Workers with full sets, and prompts that some of them hold."""

    def __init__(self, workers: int, blocks: int, holders: float, rng: random.Random) -> None:
        self.rng = rng
        self.system = digests(rng, SYSTEM_BLOCKS)
        share = blocks // workers
        self.held = [Residency(max_names=2 * share + 4096) for _ in range(workers)]  # as the view makes them
        self.shared = [digests(rng, LONG_BLOCKS) for _ in range(8)]
        self.insert_s = 0.0
        for residency in self.held:
            residency.reset(0, self.system)
            for names in self.shared:
                if rng.random() < holders:
                    self._store(residency, names[: rng.randrange(1, min(LONG_BLOCKS, max(2, share // 8)))])
            while len(residency) < share:
                self._store(residency, digests(rng, min(CONVERSATION_BLOCKS, share - len(residency))))

    @property
    def blocks(self) -> int:
        return sum(map(len, self.held))

    @property
    def memory_bytes(self) -> int:
        return sum(r.memory_bytes for r in self.held)

    def prompt(self, blocks: int) -> list[bytes]:
        """New names for each: a request's are never those of another in memory, so their hashes are not known yet."""
        names = [*self.system, *self.rng.choice(self.shared)][:blocks]
        names += digests(self.rng, blocks - len(names))
        return [bytes(bytearray(name)) for name in names]

    def _store(self, residency: Residency, names: list[bytes]) -> None:
        started = time.thread_time()
        for at in range(0, len(names), BATCH):
            residency.apply(residency.seq + 1, names[at : at + BATCH], [])
        self.insert_s += time.thread_time() - started


def timed_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.thread_time()
    result = call()
    return 1000 * (time.thread_time() - started), result


def decide(cluster: Cluster, blocks: int, repeats: int, policy: str) -> dict[str, Any]:
    """p50 and p99 in ms of the depths, of the choice, and of both."""
    depth_ms: list[float] = []
    choose_ms: list[float] = []
    rng = cluster.rng
    prompt = Prompt(
        num_tokens=blocks * BLOCK_SIZE + 1, block_size=BLOCK_SIZE, token_bytes=TOKEN_BYTES, num_layers=LAYERS
    )
    fabric = _learned(len(cluster.held), rng)
    for _ in range(repeats):
        names = cluster.prompt(blocks)
        spent, found = timed_ms(partial(depths, cluster.held, names, 0.0))
        depth_ms.append(spent)
        workers = [_worker(i, depth, rng) for i, depth in enumerate(found)]
        choose_ms.append(timed_ms(partial(choose, policy, prompt, workers, fabric))[0])
    both = [a + b for a, b in zip(depth_ms, choose_ms, strict=True)]
    return {"depth_ms": spread(depth_ms), "choose_ms": spread(choose_ms), "decision_ms": spread(both)}


def _learned(workers: int, rng: random.Random) -> Fabric:
    """What a router knows of the ways after a while: a tenth of them have been used."""
    names = [f"w{i:02d}" for i in range(workers)]
    ways = [(a, b) for a in names for b in names if a != b and rng.random() < LEARNED]
    rates = {way: (0.5 + rng.random()) * BYTES_PER_S for way in ways}
    loads = {way: LoadCost(setup_ms=5.0, bytes_per_s=rate) for way, rate in rates.items()}
    return Fabric(
        default_bytes_per_s=BYTES_PER_S,
        measured=rates,
        pull_setup_ms=5.0,
        loads=loads,
        fastest_bytes_per_s=max([BYTES_PER_S, *rates.values()]),
    )


def _worker(number: int, depth: int, rng: random.Random) -> Worker:
    return Worker(
        worker_id=f"w{number:02d}",
        role="decode" if number % 2 else "prefill",
        cached_blocks=depth,
        queued_tokens=rng.randrange(20_000),
        active_sequences=rng.randrange(64),
        free_blocks=20_000,
        num_blocks=80_000,
        transport="tcp",
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
    }


def naming(blocks: int) -> dict[str, float]:
    """Naming the blocks of a prompt, once for each request."""
    tokens = list(range(blocks * BLOCK_SIZE))
    spent = min(timed_ms(lambda: block_names(tokens, BLOCK_SIZE, bytes(NAME_BYTES)))[0] for _ in range(5))
    return {"blocks": blocks, "ms": round(spent, 3), "blocks_per_s": round(1000 * blocks / spent)}


def measure(*, most_blocks: int, holders: float, repeats: int, policy: str, seed: int) -> dict[str, Any]:
    """Each of the three sizes varied with the two others at their largest."""
    rows: list[dict[str, Any]] = []
    shapes = {(w, most_blocks) for w in WORKERS} | {(WORKERS[-1], b) for b in BLOCKS if b <= most_blocks}
    memory: dict[str, Any] = {}
    for workers, blocks in sorted(shapes):
        before = psutil.Process().memory_info().rss
        cluster = Cluster(workers, blocks, holders, random.Random(seed))
        gc.collect()
        is_main = (workers, blocks) == (WORKERS[-1], most_blocks)
        for length in PROMPTS if is_main else (LONG_BLOCKS,):
            row = {"workers": workers, "blocks": cluster.blocks, "prompt_blocks": length}
            rows.append(row | decide(cluster, length, repeats, policy))
        if is_main:
            memory = {
                "bytes_per_block": round(cluster.memory_bytes / cluster.blocks, 2),
                "rss_bytes_per_block": round((psutil.Process().memory_info().rss - before) / cluster.blocks, 2),
                "stored_per_s": round(cluster.blocks / cluster.insert_s),
            }
        del cluster
        gc.collect()
    return {
        "bench": "decision_time",
        "policy": policy,
        "holders": holders,
        "repeats": repeats,
        "rows": rows,
        "memory": memory,
        "naming": naming(LONG_BLOCKS),
        "torch_loaded": "torch" in sys.modules,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=BLOCKS[-1], help="indexed at most")
    parser.add_argument("--holders", type=float, default=0.5, help="share of workers that hold part of a prompt")
    parser.add_argument("--repeats", type=int, default=400, help="decisions timed for each row")
    parser.add_argument("--policy", default="cost", help="as router.policy")
    parser.add_argument("--seed", type=int, default=1, help="of names, depths and loads")
    parser.add_argument("--plot", type=Path, help="an SVG file of how the time grows; needs matplotlib")
    given = parser.parse_args()
    result = measure(
        most_blocks=given.blocks, holders=given.holders, repeats=given.repeats, policy=given.policy, seed=given.seed
    )
    sys.stdout.write(json.dumps(result) + "\n")
    if given.plot is not None:
        plot(result["rows"], given.plot)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time by each of the three sizes, the two others at their largest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    names = ("prompt_blocks", "workers", "blocks")
    most = {name: max(row[name] for row in rows) for name in names}
    for axes, name in zip(figure.subplots(1, 3, sharey=True), names, strict=True):
        line = sorted((r for r in rows if all(2 * r[n] > most[n] for n in names if n != name)), key=lambda r: r[name])
        for part in ("depth_ms", "choose_ms", "decision_ms"):
            for point, style in (("p50", "--"), ("p99", "-")):
                label = f"{part.removesuffix('_ms')} {point}"
                axes.plot([r[name] for r in line], [r[part][point] for r in line], style, marker="o", label=label)
        axes.set_xscale("log")
        axes.set_xlabel(name.replace("_", " "))
    figure.axes[0].set_ylabel("ms of CPU")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()
