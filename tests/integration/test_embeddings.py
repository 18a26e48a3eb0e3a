"""Embeddings and scores of real workers, with prefill and decode apart and mixed, against transformers' own states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import numpy as np
import openai
import pytest
import torch

from services.protocol.client import AsyncPdrayClient
from tests.golden.oracle import license_prompts, mean_states
from tests.integration.rig import Cluster
from tests.strict import check_document

LENGTHS = (1, 2, 7, 16, 39, 40, 41, 64, 127, 300)


@pytest.fixture(scope="module")
def prompts(tiny_cluster: Cluster) -> list[list[int]]:
    return license_prompts(tiny_cluster.model, LENGTHS)


@pytest.fixture(scope="module")
def expected(tiny_cluster: Cluster, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Transformers' means, of the length 1."""
    return [mean / mean.norm() for mean in mean_states(tiny_cluster.model, prompts)]


def check(vectors: Sequence[Sequence[float]], expected: Sequence[torch.Tensor]) -> None:
    for vector, mean in zip(vectors, expected, strict=True):
        assert np.linalg.norm(np.array(vector) - mean.numpy()) < 2e-5


def counters(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """By worker: prompt tokens computed, and found in a cache."""
    rows = httpx.get(f"{cluster.url}/v1/cluster").json()["workers"]
    return {w["worker_id"]: (w["prompt_tokens_computed"], w["prompt_tokens_cached"]) for w in rows}


def test_the_client_gets_transformers_own_states(
    tiny_cluster: Cluster, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    with openai.OpenAI(base_url=f"{tiny_cluster.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        reply = client.embeddings.create(model=model, input=prompts)
        check([entry.embedding for entry in reply.data], expected)
        assert reply.usage.prompt_tokens == sum(LENGTHS)
        text = "The quick brown fox jumps over the lazy dog."
        plain = client.embeddings.create(model=model, input=text, encoding_format="float").data[0].embedding
        packed = client.embeddings.create(model=model, input=[text], encoding_format="base64").data[0].embedding
        assert len(plain) == 48
        assert isinstance(packed, str)
    ids = httpx.post(f"{tiny_cluster.url}/tokenize", json={"prompt": text}).json()["tokens"]
    mean = mean_states(tiny_cluster.model, [ids])[0]
    check([plain], [mean / mean.norm()])


async def test_many_at_once_beside_answers(
    tiny_cluster: Cluster, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    """Asynchronous clients, each with a few texts, while completions run in the same batches."""
    async with openai.AsyncOpenAI(base_url=f"{tiny_cluster.url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def embed(start: int) -> None:
            mine = [(start + i) % len(prompts) for i in range(4)]
            reply = await client.embeddings.create(model=model, input=[prompts[i] for i in mine])
            check([entry.embedding for entry in reply.data], [expected[i] for i in mine])

        async def answer(prompt: list[int]) -> str:
            reply = await client.completions.create(
                model=model, prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            return reply.choices[0].text

        alone = await answer(prompts[5])
        answers, *_ = await asyncio.gather(
            asyncio.gather(*(answer(prompts[5]) for _ in range(4))), *(embed(i) for i in range(20))
        )
    assert answers == [alone] * 4


def test_no_cached_block_is_taken_and_none_is_left(
    tiny_cluster: Cluster, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    prompt, mean = prompts[-1], expected[-1]
    tiny_cluster.complete(prompt, max_tokens=1)
    before = counters(tiny_cluster)
    for _ in range(2):
        reply = httpx.post(f"{tiny_cluster.url}/v1/embeddings", json={"input": prompt}, timeout=60).json()
        check_document(reply)
        check([reply["data"][0]["embedding"]], [mean])
    asyncio.run(tiny_cluster.idle())
    grown = {w: (now[0] - before[w][0], now[1] - before[w][1]) for w, now in counters(tiny_cluster).items()}
    assert sum(computed for computed, _ in grown.values()) == 600
    assert all(cached == 0 for _, cached in grown.values())
    assert all(computed == 0 for worker, (computed, _) in grown.items() if worker.startswith("decode"))


def test_scores_are_cosines_of_these_vectors(tiny_cluster: Cluster) -> None:
    texts = ["a quick fox", "a lazy dog", "the wall of China"]
    ids = [httpx.post(f"{tiny_cluster.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    means = [mean / mean.norm() for mean in mean_states(tiny_cluster.model, ids)]
    body = {"text_1": texts[0], "text_2": texts[1:]}
    reply = httpx.post(f"{tiny_cluster.url}/score", json=body, timeout=60).json()
    assert [x["score"] for x in reply["data"]] == pytest.approx([float(means[0] @ m) for m in means[1:]], abs=2e-5)


async def test_grpc_gives_the_same(
    tiny_cluster: Cluster, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    async with AsyncPdrayClient(f"127.0.0.1:{tiny_cluster.grpc_port}") as client:
        check(await client.embed(prompts), expected)
        assert (await client.model()).can_embed


async def test_a_client_that_leaves_frees_every_block(tiny_cluster: Cluster) -> None:
    """Hundreds of texts, and the client is gone while they are computed."""
    long = license_prompts(tiny_cluster.model, (900,)) * 200
    async with httpx.AsyncClient() as client:
        for wait_s in (0.02, 0.2, 0.5):
            task = asyncio.create_task(
                client.post(f"{tiny_cluster.url}/v1/embeddings", json={"input": long}, timeout=60)
            )
            await asyncio.sleep(wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await tiny_cluster.idle()


def test_the_whole_context_may_be_embedded_and_one_more_is_refused(tiny_cluster: Cluster) -> None:
    url = f"{tiny_cluster.url}/v1/embeddings"
    context = int(httpx.get(f"{tiny_cluster.url}/v1/models").json()["data"][0]["max_model_len"])
    assert httpx.post(url, json={"input": [7] * context}, timeout=60).status_code == 200
    refused = httpx.post(url, json={"input": [[7], [7] * (context + 1)]}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1]")


def test_the_timeline_tells_of_one_worker(tiny_cluster: Cluster) -> None:
    headers = {"X-Request-Id": "embed-me"}
    assert httpx.post(f"{tiny_cluster.url}/v1/embeddings", json={"input": "x"}, headers=headers).status_code == 200
    shown = httpx.get(f"{tiny_cluster.url}/debug/requests/embed-me").json()
    assert shown["outcome"] == "ok"
    assert shown["prefill"].startswith(("prefill", "mixed"))
    assert shown["decode"] == ""
    assert "finished" in [event["name"] for event in shown["events"]]
