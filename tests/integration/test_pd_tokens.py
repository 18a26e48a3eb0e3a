"""The exactness contract through real processes: prefill and decode apart, mixed, transformers: the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.protocol.client import PdrayClient
from tests import prompts
from tests.integration.rig import Cluster

NUM_TOKENS = 32


def generate(cluster: Cluster, prompt_ids: tuple[int, ...], num_tokens: int = NUM_TOKENS, **sampling: Any) -> list[int]:
    """Greedy ids from the cluster, end tokens ignored."""
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens, **sampling}
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        return [i for piece in client.generate(list(prompt_ids), **options) for i in piece.token_ids]


def run(folder: Path, model: Path, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(folder, model, **options)
    asyncio.run(cluster.start())
    try:
        yield cluster
    finally:
        asyncio.run(cluster.stop())


SHAPES: dict[str, dict[str, Any]] = {
    "tcp-64": {"settings": {"transfer.transport": "tcp", "engine.max_num_batched_tokens": 64}},
    "mooncake-512": {"settings": {"transfer.transport": "mooncake"}},
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
}


@pytest.fixture(scope="module", params=SHAPES)
def cluster(
    request: pytest.FixtureRequest, default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    yield from run(tmp_path_factory.mktemp(request.param), default_model_folder, **SHAPES[request.param])


def test_greedy_tokens_are_those_of_transformers(cluster: Cluster, default_model_folder: Path) -> None:
    for length in prompts.QUICK_LENGTHS:
        prompt_ids = prompts.prompt(length)
        expected = prompts.greedy(default_model_folder, prompt_ids, NUM_TOKENS)
        assert generate(cluster, prompt_ids) == list(expected), f"prompt of {length} tokens"


def test_the_same_prompts_at_once_and_cached_give_the_same_tokens(cluster: Cluster, default_model_folder: Path) -> None:
    wanted = [prompts.prompt(n) for n in (17, 33, 200)] * 2
    with ThreadPoolExecutor(len(wanted)) as pool:
        got = list(pool.map(partial(generate, cluster), wanted))
    for prompt_ids, ids in zip(wanted, got, strict=True):
        assert ids == list(prompts.greedy(default_model_folder, prompt_ids, NUM_TOKENS)), len(prompt_ids)


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_others(cluster: Cluster) -> None:
    def seeded(seed: int) -> list[int]:
        return generate(cluster, prompts.prompt(33), 20, temperature=1.1, top_p=0.95, seed=seed)

    alone = seeded(7)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(seeded, [7, 1, 2, 3, 4, 7]))
    assert together[0] == together[5] == alone
    assert len({tuple(x) for x in together}) == 5


def test_a_single_token_answer_needs_no_decode_worker(cluster: Cluster, default_model_folder: Path) -> None:
    prompt_ids = prompts.prompt(32)
    expected = prompts.greedy(default_model_folder, prompt_ids, NUM_TOKENS)
    assert generate(cluster, prompt_ids, 1) == [expected[0]]
    assert generate(cluster, prompt_ids, 2) == list(expected[:2])


def test_the_timeline_shows_who_served_and_what_was_moved(cluster: Cluster) -> None:
    ids = list(prompts.prompt(100, seed=3))
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    debug = asyncio.run(cluster.debug(reply.headers["x-request-id"]))
    if cluster.mixed:
        assert debug["decode"] == "mixed-0" or debug["prefill"] == "mixed-0"
        return
    assert (debug["prefill"], debug["decode"]) == ("prefill-0", "decode-0")
    assert debug["layers_moved"] == 30
    assert debug["bytes_moved"] == 7 * 16 * 30 * 2 * 3 * 64 * 4  # 7 blocks of 16 tokens, fp32
    arrows = [e["name"] for e in debug["events"] if e.get("detail", {}).get("side") == "reader"]
    assert arrows[:5] == ["requested", "granted", "receiving", "verifying", "committed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("chunk", "transport", "counts"),
    [(7, "tcp", {}), (64, "mooncake", {}), (512, "tcp", {}), (64, "tcp", {"prefill": 0, "decode": 0, "mixed": 1})],
    ids=["tcp-7", "mooncake-64", "tcp-512", "mixed-64"],
)
def test_64_prompts_agree_for_every_chunk_size(
    chunk: int, transport: str, counts: dict[str, int], default_model_folder: Path, tmp_path: Path
) -> None:
    settings = {
        "transfer.transport": transport,
        "engine.max_num_batched_tokens": chunk,
        "budget.first_token_s": 900,  # chunks of 7 tokens, several long prompts in a row
    }
    for cluster in run(tmp_path, default_model_folder, settings=settings, **counts):
        wanted = [prompts.prompt(length) for length in prompts.all_lengths()]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(partial(generate, cluster), wanted))
        for prompt_ids, ids in zip(wanted, answers, strict=True):
            expected = list(prompts.greedy(default_model_folder, prompt_ids, NUM_TOKENS))
            assert ids == expected, f"prompt of {len(prompt_ids)} tokens, chunk {chunk}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_prompts_agree_when_every_chunk_is_one_token(default_model_folder: Path, tmp_path: Path) -> None:
    settings = {"transfer.transport": "tcp", "engine.max_num_batched_tokens": 1, "engine.max_num_seqs": 1}
    for cluster in run(tmp_path, default_model_folder, settings=settings):
        for length in prompts.EDGES:
            prompt_ids = prompts.prompt(length)
            expected = prompts.greedy(default_model_folder, prompt_ids, NUM_TOKENS)
            assert generate(cluster, prompt_ids) == list(expected), f"prompt of {length} tokens"
