"""A pool of 24 blocks, mixed and with prefill and decode apart: all end, none changes, what never fits is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.rig import Cluster

NUM_BLOCKS, BLOCK_SIZE = 24, 16


class SeededCluster(Cluster):
    """Each process hashes Python's own objects with another seed."""

    def _spawn(self, name: str, arguments: list[str], config: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            seeds = {"prefill-0": "0", "decode-0": "1", "mixed-0": "1"}
            if name in seeds:
                patch.setenv("PYTHONHASHSEED", seeds[name])
            super()._spawn(name, arguments, config)


@pytest.fixture(scope="module", params=["apart", "mixed"])
def cluster(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    counts = {"prefill": 0, "decode": 0, "mixed": 1} if request.param == "mixed" else {}
    cluster = SeededCluster(
        tmp_path_factory.mktemp(request.param),
        tiny_model_folder,
        **counts,
        settings={
            "engine.num_blocks": NUM_BLOCKS,
            "engine.block_size": BLOCK_SIZE,
            "model.max_model_len": 1024,
            "transfer.transport": "tcp",
        },
    )
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["choices"][0]["text"]
    return found


def totals(cluster: Cluster) -> dict[str, int]:
    """Counters over all workers, when idle."""
    rows = asyncio.run(cluster.idle())
    names = ("preemptions", "prompt_tokens_cached", "tokens_recomputed", "prompt_tokens_computed")
    return {name: sum(row[name] for row in rows) for name in names}


def together(cluster: Cluster, requests: list[tuple[list[int], dict[str, Any]]]) -> list[str]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda item: text(cluster.complete(item[0], **item[1])), requests))


def test_four_requests_that_grow_to_half_the_pool_each_all_end_with_the_text_they_give_alone(cluster: Cluster) -> None:
    prompts = [ids(4 * BLOCK_SIZE, seed) for seed in range(4)]
    grown = {"max_tokens": 8 * BLOCK_SIZE}
    before = totals(cluster)
    crowded = together(cluster, [(p, grown) for p in prompts])
    after = totals(cluster)
    preemptions = after["preemptions"] - before["preemptions"]
    assert 1 <= preemptions <= (4 * 8 + 4) * 4
    assert after["tokens_recomputed"] > before["tokens_recomputed"]
    assert after["prompt_tokens_cached"] == before["prompt_tokens_cached"]  # what is computed again is no hit
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 4 * 4 * BLOCK_SIZE
    assert crowded == [text(cluster.complete(p, **grown)) for p in prompts]


@pytest.mark.parametrize(("length", "max_tokens"), [(700, 4), (300, 600)])
def test_what_is_larger_than_the_pool_is_refused_at_once_and_the_next_request_served(
    cluster: Cluster, length: int, max_tokens: int
) -> None:
    reply = cluster.complete(ids(length, 9), max_tokens=max_tokens)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    need = -(-(length + max_tokens - 1) // BLOCK_SIZE)
    assert {str(need), str(NUM_BLOCKS)} <= set(error["message"].replace(",", "").split()), error
    assert text(cluster.complete(ids(10, 10)))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_prompt_sent_three_times_computes_its_last_token_each_time(cluster: Cluster, blocks: int) -> None:
    prompt = ids(blocks * BLOCK_SIZE, 20 + blocks)
    replies = [cluster.complete(prompt) for _ in range(3)]
    assert len({text(r) for r in replies}) == 1
    cached = [r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
    assert cached == [0, *[(blocks - 1) * BLOCK_SIZE] * 2]


def test_a_seeded_request_is_the_same_alone_and_among_unseeded_neighbours_which_vary(cluster: Cluster) -> None:
    prompt = ids(20, 30)
    seeded = {"seed": 7, "temperature": 1.1, "max_tokens": 20}
    unseeded = {"temperature": 1.1, "max_tokens": 20}
    alone = {text(cluster.complete(prompt, **seeded)) for _ in range(2)}
    crowd = together(cluster, [(prompt, seeded), *[(prompt, unseeded)] * 6])
    assert alone == {crowd[0]}
    assert len(set(crowd[1:])) > 1


def test_block_names_agree_between_processes_with_other_hash_seeds_and_after_a_router_restart(cluster: Cluster) -> None:
    prompt = ids(4 * BLOCK_SIZE + 1, 40)
    assert text(cluster.complete(prompt))
    for _ in range(2):
        usage = cluster.complete(prompt).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_SIZE
        asyncio.run(cluster.idle())
        cluster.kill("router")
        cluster.processes["router"].wait(10)
        cluster.start_router()
        asyncio.run(cluster.ready())
