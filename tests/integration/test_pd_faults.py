"""When something goes wrong a request ends clearly, and every block comes back."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import prompts
from tests.integration.rig import Cluster


@pytest.fixture(scope="module")
def cluster(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("faults"),
        default_model_folder,
        settings={
            "transfer.transport": "tcp",
            "transfer.lease_ms": 2000,
            "transfer.lease_renew_ms": 500,
            "transfer.throttle_bytes_per_s": 100_000_000,
        },
    )
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())


async def test_clients_that_leave_at_any_moment_leave_no_block_behind(cluster: Cluster) -> None:
    rng = random.Random(5)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": list(prompts.prompt(300, seed=100 + number)),
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with asyncio.timeout(rng.uniform(0.01, 2.0)):
                async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as reply:
                    async for _ in reply.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async with httpx.AsyncClient(timeout=60) as client:
        for first in range(0, 12, 4):
            await asyncio.gather(*(leave(client, first + i) for i in range(4)))
    await cluster.idle()
    reply = await asyncio.to_thread(cluster.complete, list(prompts.prompt(40, seed=9)))
    assert reply.status_code == 200, reply.text


async def test_a_decode_worker_that_dies_mid_stream_ends_the_stream_with_an_error_and_done(
    default_model_folder: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, default_model_folder, settings={"transfer.transport": "tcp"})
    await cluster.start()
    try:
        lines = await _stream_until_killed(cluster)
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert error["code"] == "worker_lost"
        rows = [w for w in (await cluster.cluster())["workers"] if w["worker_id"] == "prefill-0"]
        assert rows[0]["blocks"]["quarantined"] == 0
        ready = httpx.get(f"{cluster.url}/ready", timeout=5)
        assert ready.status_code == 503
    finally:
        await cluster.stop()


async def _stream_until_killed(cluster: Cluster) -> list[str]:
    body = {"prompt": list(prompts.prompt(40)), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{cluster.url}/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line:
                lines.append(line)
            if len(lines) == 5:
                cluster.kill("decode-0")
    return lines


@pytest.mark.slow  # the fault matrix has it in the quick suite
async def test_a_prefill_worker_that_dies_before_the_first_byte_is_replaced_by_another(
    default_model_folder: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, default_model_folder, prefill=2, settings={"transfer.transport": "tcp"})
    await cluster.start()
    try:
        prompt = list(prompts.prompt(600))
        call = asyncio.create_task(asyncio.to_thread(cluster.complete, prompt))
        victim = await _computing(cluster)
        cluster.kill(victim)
        reply = await call
        assert reply.status_code == 200, reply.text
        assert tuple(prompts.greedy(default_model_folder, tuple(prompt), 4)) == tuple(await _ids(cluster, prompt))
    finally:
        await cluster.stop()


async def _computing(cluster: Cluster) -> str:
    """The prefill worker that has work."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for w in (await cluster.cluster())["workers"]:
            if w["role"] == "prefill" and (w["running"] or w["waiting"] or w["blocks"]["used"]):
                return str(w["worker_id"])
        await asyncio.sleep(0.02)
    raise AssertionError("no prefill worker took the request")


async def _ids(cluster: Cluster, prompt: list[int]) -> list[int]:
    from services.protocol.client import AsyncPdrayClient

    async with AsyncPdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        pieces = client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=4)
        return [i async for piece in pieces for i in piece.token_ids]


@pytest.mark.slow  # the fault matrix has it in the quick suite
async def test_a_worker_that_restarts_at_its_address_serves_again(cluster: Cluster) -> None:
    for name in ("decode-0", "prefill-0"):
        before = (await cluster.worker(name))["epoch"]
        cluster.kill(name)
        await asyncio.to_thread(cluster.processes[name].wait, 10)
        cluster.start_worker(name)
        await cluster.ready()
        assert (await cluster.worker(name))["epoch"] != before
        for seed in range(3):
            reply = await asyncio.to_thread(cluster.complete, list(prompts.prompt(50, seed=300 + seed)))
            assert reply.status_code == 200, reply.text


async def test_workers_that_cannot_exchange_kv_are_refused_with_both_values(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    cluster = Cluster(
        tmp_path,
        tiny_model_folder,
        settings={"transfer.transport": "tcp"},
        worker_settings={"decode-0": {"engine.block_size": 32}},
    )
    await cluster.start(wait=False)
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    ready = httpx.get(f"{cluster.url}/ready", timeout=2)
                    if "block_size" in ready.text:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        assert ready.status_code == 503
        assert "16" in ready.text
        assert "32" in ready.text
        reply = cluster.complete("hello")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "incompatible_workers"
        assert "block_size" in reply.json()["error"]["message"]
    finally:
        await cluster.stop()


async def test_a_stopped_worker_finishes_its_streams_before_it_goes(cluster: Cluster) -> None:
    body = {"prompt": list(prompts.prompt(20)), "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{cluster.url}/v1/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line:
                lines.append(line)
            if len(lines) == 3:
                cluster.kill("decode-0", signal.SIGTERM)
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    assert await asyncio.to_thread(cluster.processes["decode-0"].wait, 20) == 0
    cluster.start_worker("decode-0")
    await cluster.ready()
