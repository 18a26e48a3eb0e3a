"""Turns of one conversation through one pair: what the decode worker generated is sent back, not computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.index.embedded import EmbeddedValkey
from services.protocol.client import PdrayClient, Piece
from tests import prompts
from tests.integration.rig import Cluster

BLOCK = 16
FIRST, NEXT, ANSWER = 200, 40, 48  # tokens of the first prompt, of each later one, and of each answer
USER = [list(prompts.prompt(NEXT if turn else FIRST, seed=31 + turn)) for turn in range(3)]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedValkey()
    yield asyncio.run(server.start(tmp_path_factory.mktemp("valkey")))
    asyncio.run(server.stop())


def start(folder: Path, model: Path, **fields: Any) -> Cluster:
    cluster = Cluster(folder, model, **fields)
    asyncio.run(cluster.start())
    return cluster


def answer(cluster: Cluster, prompt: list[int]) -> tuple[list[int], Piece]:
    """Token ids of an answer, drawn with a seed so that they vary, and its last piece."""
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        pieces = list(client.generate(prompt, temperature=1.0, seed=5, ignore_eos=True, max_tokens=ANSWER))
    return [i for piece in pieces for i in piece.token_ids], pieces[-1]


async def row(cluster: Cluster, name: str) -> dict[str, Any]:
    """What /v1/cluster says of an idle worker."""
    await cluster.idle()
    return await cluster.worker(name)


def computed(cluster: Cluster) -> int:
    """Prompt tokens that P has computed so far."""
    tokens: int = asyncio.run(row(cluster, "prefill-0"))["prompt_tokens_computed"]
    return tokens


@pytest.fixture(scope="module")
def cold_answers(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The same conversation on one mixed worker that remembers nothing."""
    folder = tmp_path_factory.mktemp("cold")
    forgetful = {"engine.prefix_cache": "off"}
    cluster = start(folder, default_model_folder, prefill=0, decode=0, mixed=1, settings=forgetful)
    answers, prompt = [], list[int]()
    for user in USER:
        ids, last = answer(cluster, prompt + user)
        assert last.usage is not None
        assert last.usage.cached_tokens == 0
        answers.append(ids)
        prompt += user + ids
    asyncio.run(cluster.stop())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
def test_each_turn_computes_only_what_the_user_has_added(
    transport: str, cold_answers: list[list[int]], valkey: str, default_model_folder: Path, tmp_path: Path
) -> None:
    settings = {"transfer.transport": transport, "redis.namespace": transport}
    cluster = start(tmp_path, default_model_folder, redis_url=valkey, settings=settings)
    try:
        prompt, before = list[int](), 0
        for turn, user in enumerate(USER):
            prompt += user
            ids, last = answer(cluster, prompt)
            assert ids == cold_answers[turn]
            after = computed(cluster)
            extra = after - before - len(user)  # what was not computed before: at least the answer's last token
            assert extra == 0 if turn == 0 else 0 < extra <= BLOCK
            assert last.usage is not None
            assert last.usage.cached_tokens == len(prompt) - (after - before)
            prompt, before = prompt + ids, after
        p = asyncio.run(row(cluster, "prefill-0"))
        longer = [FIRST, FIRST + ANSWER + NEXT]  # prompts whose answers were sent back
        sent_back = sum((n + ANSWER - 1) // BLOCK - n // BLOCK for n in longer)
        assert (p["pulls"], p["pulls_failed"], p["pulled_blocks"]) == (2, 0, sent_back)
        events = [e["name"] for e in asyncio.run(cluster.debug(last.request_id))["events"]]
        assert events.count("pull_committed") == 2  # on both sides
    finally:
        asyncio.run(cluster.stop())


@pytest.mark.slow
def test_without_pulls_the_last_answer_is_computed_again(
    cold_answers: list[list[int]], default_model_folder: Path, tmp_path: Path
) -> None:
    settings = {"transfer.transport": "tcp", "router.pull": "off"}
    cluster = start(tmp_path, default_model_folder, settings=settings)
    try:
        assert answer(cluster, USER[0])[0] == cold_answers[0]
        before = computed(cluster)
        assert answer(cluster, USER[0] + cold_answers[0] + USER[1])[0] == cold_answers[1]
        assert computed(cluster) - before == FIRST % BLOCK + ANSWER + NEXT
        assert asyncio.run(row(cluster, "prefill-0"))["pulls"] == 0
    finally:
        asyncio.run(cluster.stop())


@pytest.mark.slow
def test_a_holder_that_dies_while_it_sends_back_costs_time_and_no_token(
    cold_answers: list[list[int]], valkey: str, default_model_folder: Path, tmp_path: Path
) -> None:
    slow = {"decode-0": {"transfer.throttle_bytes_per_s": 50_000}}
    settings = {"transfer.transport": "tcp", "transfer.pull_ms": 30_000, "redis.namespace": "dies"}
    cluster = start(tmp_path, default_model_folder, decode=2, redis_url=valkey, worker_settings=slow, settings=settings)
    try:
        assert answer(cluster, USER[0])[0] == cold_answers[0]
        asyncio.run(cluster.idle())
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(answer, cluster, USER[0] + cold_answers[0] + USER[1])
            asyncio.run(pulling(cluster))
            cluster.kill("decode-0")
            assert second.result(60)[0] == cold_answers[1]
        p = asyncio.run(row(cluster, "prefill-0"))
        assert (p["pulls"], p["pulls_failed"], p["pulled_blocks"]) == (1, 1, 0)
        assert p["blocks"]["quarantined"] == 0
    finally:
        asyncio.run(cluster.stop())


async def pulling(cluster: Cluster) -> None:
    """Until P waits for KV."""
    async with asyncio.timeout(20):
        while (await cluster.worker("prefill-0"))["pulls"] == 0:
            await asyncio.sleep(0.05)
