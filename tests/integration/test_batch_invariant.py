"""With engine.batch_invariant a bfloat16 answer is the same alone, in a crowd, cold, cached, mixed, or handed off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.engine.native.build import KINDS, cpu_flags, find_compiler
from tests import prompts
from tests.integration.rig import Cluster
from tests.integration.test_pd_tokens import generate

pytestmark = pytest.mark.skipif(
    not any(kind.cpu_flags <= cpu_flags() for kind in KINDS) or find_compiler() is None,
    reason="no native kernels on this machine, and no other path is batch-invariant",
)
NUM_TOKENS = 16
SETTINGS = {"model.dtype": "bfloat16", "engine.batch_invariant": True, "transfer.transport": "tcp"}
SHAPES: dict[str, dict[str, Any]] = {
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
    "apart": {"prefill": 1, "decode": 1},
}


def requests(count: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 300 tokens; every other one is sampled by a seed."""
    rng = random.Random(count)
    made = []
    for i in range(count):
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {}
        made.append({"prompt_ids": prompts.prompt(rng.randint(1, 300), seed=i), **sampled})
    return made


def answers(cluster: Cluster, wanted: Sequence[dict[str, Any]], at_once: int) -> list[list[int]]:
    def one(request: dict[str, Any]) -> list[int]:
        options = {k: v for k, v in request.items() if k != "prompt_ids"}
        return generate(cluster, request["prompt_ids"], NUM_TOKENS, **options)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(one), wanted))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_an_answer_is_the_same_in_any_company(count: int, default_model_folder: Path, tmp_path: Path) -> None:
    wanted, found = requests(count), {}
    for shape, counts in SHAPES.items():
        folder = tmp_path / shape
        folder.mkdir()
        cluster = Cluster(folder, default_model_folder, settings=SETTINGS, **counts)
        asyncio.run(cluster.start())
        try:
            found[f"{shape}, cold, in a crowd"] = answers(cluster, wanted, 17)
            found[f"{shape}, cached, in a crowd"] = answers(cluster, wanted[::-1], 17)[::-1]
            found[f"{shape}, cached, alone"] = answers(cluster, wanted, 1)
        finally:
            asyncio.run(cluster.stop())
    alone, *others = found.values()
    for name, other in zip(list(found)[1:], others, strict=True):
        unequal = [i for i, (a, b) in enumerate(zip(alone, other, strict=True)) if a != b]
        assert not unequal, f"{name}: requests {unequal[:5]} of {count} differ"
