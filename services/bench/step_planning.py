"""What planning a step costs: ``python -m services.bench.step_planning``; no model runs.

64 sequences decode and 1,000 prompts wait, for each policy in two situations: all slots taken, and slots free but the
pool full, so that each step looks for somebody who fits. Some sequences end in every few steps and as many arrive. One
JSON line: CPU time of `schedule` and `complete` together, and the median's share of a decode step. Where others want
the same cores, the tenth percentile tells most of the code, for it saw the least of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass

from kvstore.blocks import block_names, namespace_root
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, Sampling
from services.engine.policies import POLICIES
from services.engine.scheduler import Scheduler, Step
from services.engine_config import EngineConfig

BLOCK_SIZE = 16
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=BLOCK_SIZE, layout_version=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How much there is to plan."""

    running: int = 64
    waiting: int = 1000
    steps: int = 400
    seed: int = 1


class Load:
    """Prompts of a few families, as system prompts make them, that come as others end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._families = [[self._random.randrange(30_000) for _ in range(512)] for _ in range(20)]
        self._count = 0

    def request(self) -> AddSequence:
        draw = self._random
        shared = draw.choice(self._families)[: draw.choice([0, 64, 256, 512])]
        prompt = shared + [draw.randrange(30_000) for _ in range(draw.randint(20, 400))]
        self._count += 1
        return AddSequence(
            seq_id=f"s{self._count}",
            prompt_ids=tuple(prompt),
            sampling=Sampling(max_tokens=draw.randint(64, 512)),
            root=ROOT,
            block_names=tuple(block_names(prompt, BLOCK_SIZE, ROOT)),
            priority=draw.choice([0, 0, 0, 1, 2]),
        )


def measure(policy: str, scenario: Scenario, *, free_slots: bool) -> dict[str, float]:
    """Milliseconds of planning for each step, once so many run."""
    load = Load(scenario.seed)
    num_blocks = scenario.running * 27 if free_slots else scenario.running * 200
    limits = Limits(num_blocks, BLOCK_SIZE, 8192, vocab_size=30_000)
    slots = 4 * scenario.running if free_slots else scenario.running
    scheduler = Scheduler(
        BlockPool(num_blocks), limits, max_num_batched_tokens=512, max_num_seqs=slots, rules=EngineConfig(policy=policy)
    )
    took: list[float] = []
    warm_up = 400
    for number in range(warm_up + scenario.steps):
        while len(scheduler.roster.queue) < scenario.waiting:
            scheduler.add(load.request())
        started = time.thread_time()
        step = scheduler.schedule()
        planned = time.thread_time()
        tokens = _sampled(step)
        completing = time.thread_time()
        scheduler.complete(step, tokens, {})
        if number >= warm_up:
            took.append(1e3 * (planned - started + time.thread_time() - completing))
        scheduler.roster.pool.take_events()
    took.sort()
    return {
        "p10_ms": round(took[len(took) // 10], 4),
        "median_ms": round(statistics.median(took), 4),
        "p99_ms": round(took[int(len(took) * 0.99)], 4),
        "running": scheduler.num_running,
        "preemptions": scheduler.roster.preemptions,
    }


def _sampled(step: Step) -> dict[str, int]:
    return {key: 7 for work in step.work for key, _ in work.draws}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--decode-step-ms", type=float, default=15.0, help="what a decode step takes")
    parser.add_argument("--policy", choices=sorted(POLICIES), action="append", help="repeatable; default: all")
    given = parser.parse_args()
    scenario = Scenario(running=given.running, waiting=given.waiting, steps=given.steps)
    result: dict[str, object] = {
        "running": scenario.running,
        "waiting": scenario.waiting,
        "decode_step_ms": given.decode_step_ms,
    }
    for policy in given.policy or POLICIES:
        rows: dict[str, dict[str, float]] = {}
        for name, free_slots in (("slots_taken", False), ("pool_full", True)):
            gc.collect()
            row = measure(policy, scenario, free_slots=free_slots)
            rows[name] = row | {"share_of_step": round(row["median_ms"] / given.decode_step_ms, 4)}
        result[policy] = rows
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
