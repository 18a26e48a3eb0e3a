"""A prefill worker whose blocks are few and whose tier is large: real processes, KV that left and came back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvstore.index.base import Tier
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.redis import RedisIndex
from tests.integration.rig import Cluster


def prompt(seed: int, length: int = 500) -> list[int]:
    return [(seed * 131 + 7 * i * i + i) % 500 + 3 for i in range(length)]


@pytest.mark.parametrize(("tier", "kept"), [("host", 496), pytest.param("lmcache", 448, marks=pytest.mark.slow)])
async def test_an_evicted_prompt_is_loaded_counted_and_answered_alike(
    tier: str, kept: int, tiny_model_folder: Path, tmp_path: Path
) -> None:
    if tier == "lmcache":
        pytest.importorskip("lmcache", reason="LMCache is not installed; make setup does it")
    settings = {
        "transfer.transport": "tcp",
        "engine.num_blocks": 40,
        "tier.connector": tier,
        "tier.host_bytes": 64 << 20,
        "tier.chunk_tokens": 64,
    }
    cluster = await Cluster(tmp_path, tiny_model_folder, settings=settings).start()
    try:
        first = await asyncio.to_thread(cluster.complete, prompt(1))
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await asyncio.to_thread(cluster.complete, prompt(2))
        again = await asyncio.to_thread(cluster.complete, prompt(1))
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == kept
        worker = await cluster.worker("prefill-0")
        assert worker["prompt_tokens_computed"] == 2 * 500 + 500 - kept
        loaded = worker["cached_by_source"][tier]
        assert loaded == kept - worker["cached_by_source"]["device"]
        record = await cluster.debug(again.headers["x-request-id"])
        (event,) = [e for e in record["events"] if e["name"] == "kv_loaded"]
        assert (event["detail"]["source"], event["detail"]["blocks"] * 16) == (tier, loaded)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{cluster.url}/metrics")).text
        assert f'source="{tier}",worker="prefill-0"}} {float(loaded)}' in text
    finally:
        await cluster.stop()


@pytest.mark.slow
async def test_what_the_host_tier_keeps_is_published_beside_what_the_device_has(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    server = EmbeddedValkey()
    url = await server.start(tmp_path / "valkey")
    settings = {
        "transfer.transport": "tcp",
        "engine.num_blocks": 40,
        "tier.connector": "host",
        "tier.host_bytes": 64 << 20,
        "redis.heartbeat_s": 1.0,
    }
    cluster = await Cluster(tmp_path, tiny_model_folder, settings=settings, redis_url=url).start()
    index = RedisIndex(url, "default", 15.0)
    try:
        for seed in (1, 2):
            await asyncio.to_thread(cluster.complete, prompt(seed))
        (record,) = [r for r in await index.workers() if r.worker_id == "prefill-0"]
        async with asyncio.timeout(20):
            while len((seen := await index.snapshot(record.worker_id, record.epoch)).lower.get(Tier.HOST, ())) < 62:
                await asyncio.sleep(0.05)
        assert len(seen.lower[Tier.HOST]) == 62  # 31 full blocks of each prompt
        assert len(seen.names) <= 40
        assert seen.names < seen.lower[Tier.HOST]
    finally:
        await index.close()
        await cluster.stop()
        await server.stop()
