"""What was computed before is found again: by prompt, by worker, over a router's restart, and never over a salt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvstore.index.embedded import EmbeddedValkey
from tests import prompts
from tests.integration.rig import Cluster, free_ports

PROMPT = list(prompts.prompt(200, seed=11))


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedValkey()
    yield asyncio.run(server.start(tmp_path_factory.mktemp("valkey")))
    asyncio.run(server.stop())


@pytest.fixture(scope="module")
def cluster(valkey: str, default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("hits"),
        default_model_folder,
        prefill=2,
        redis_url=valkey,
        settings={"transfer.transport": "tcp", "redis.heartbeat_s": 1.0, "redis.ttl_s": 10.0},
    )
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())


def cached(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    tokens: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def prefill_of(cluster: Cluster, reply: httpx.Response) -> str:
    name: str = asyncio.run(cluster.debug(reply.headers["x-request-id"]))["prefill"]
    return name


def test_the_second_time_a_prompt_is_served_from_the_worker_that_has_it(cluster: Cluster) -> None:
    first = cluster.complete(PROMPT)
    assert cached(first) == 0
    for _ in range(3):
        again = cluster.complete(PROMPT)
        assert cached(again) == 192  # 12 full blocks of 16; the last 8 tokens are computed
        assert prefill_of(cluster, again) == prefill_of(cluster, first)
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]


def test_a_new_router_knows_from_valkey_who_has_a_prompt(cluster: Cluster) -> None:
    fresh = [x + 1 for x in PROMPT]
    owner = prefill_of(cluster, cluster.complete(fresh))
    asyncio.run(cluster.idle())
    cluster.kill("router")
    cluster.processes["router"].wait(10)
    cluster.start_router()
    asyncio.run(cluster.ready())
    asyncio.run(_known(cluster, owner))
    assert asyncio.run(cluster.cluster())["redis"]["mode"] == "external"
    again = cluster.complete(fresh)
    assert (cached(again), prefill_of(cluster, again)) == (192, owner)


async def _known(cluster: Cluster, worker_id: str) -> None:
    """Until the router's view, filled from the index alone, has everything that this worker holds."""
    async with asyncio.timeout(20):
        while True:
            row = await cluster.worker(worker_id)
            if row["known_blocks"] >= row["blocks"]["cached"] > 0:
                return
            await asyncio.sleep(0.1)


def test_prompts_under_different_salts_share_nothing(cluster: Cluster) -> None:
    prompt = [x + 2 for x in PROMPT]
    for salt in (None, "a", "b", "SmolLM2-135M-Instruct"):
        body = {} if salt is None else {"cache_salt": salt}
        assert cached(cluster.complete(prompt, **body)) == 0, salt
        assert cached(cluster.complete(prompt, **body)) == 192, salt


@pytest.mark.parametrize("length", [1, 16, 48, 49])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(cluster: Cluster, length: int) -> None:
    prompt = list(prompts.prompt(length, seed=21))
    texts = set()
    for round_ in range(3):
        reply = cluster.complete(prompt)
        assert cached(reply) == (0 if round_ == 0 else (length - 1) // 16 * 16)
        texts.add(reply.json()["choices"][0]["text"])
    assert len(texts) == 1


def test_a_router_that_starts_without_redis_finds_its_workers_and_serves(
    default_model_folder: Path, tmp_path: Path
) -> None:
    dead = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    cluster = Cluster(tmp_path, default_model_folder, redis_url=dead, settings={"transfer.transport": "tcp"})
    asyncio.run(cluster.start())
    try:
        assert asyncio.run(cluster.cluster())["redis"]["mode"] == "down"
        assert cached(cluster.complete(PROMPT)) == 0
        assert cached(cluster.complete(PROMPT)) == 192
    finally:
        asyncio.run(cluster.stop())
