"""A tenant never finds what another computed: by prompt, salt, prompt_cache_key, over HTTP and gRPC (case A13)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.protocol.client import CallOptions, PdrayClient, Sampling
from services.router.access.tenancy import block_salt
from tests import prompts
from tests.access import bearer, write_keys
from tests.integration.rig import Cluster, free_ports

pytestmark = pytest.mark.slow
CACHED = 48  # of 64 tokens in blocks of 16: at least one token is computed


class Doors:
    """Two routers before the same workers: one asks for keys, the other knows nobody."""

    def __init__(self, cluster: Cluster, http_port: int, grpc_port: int) -> None:
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{http_port}"
        self.grpc = f"127.0.0.1:{grpc_port}"

    def cached(self, seed: int, key: str = "", **body: Any) -> int:
        """Cached tokens of one request with a prompt of 64 tokens; without a key by the other router."""
        values = {"prompt": list(prompts.prompt(64, seed=seed)), "max_tokens": 2, "temperature": 0, **body}
        url, headers = (self.url, bearer(key)) if key else (self.cluster.url, {})
        reply = httpx.post(f"{url}/v1/completions", json=values, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def cached_by_grpc(self, seed: int, key: str, cache_salt: str = "") -> int:
        with PdrayClient(self.grpc, api_key=f"{key}-key") as client:
            sampling, options = Sampling(max_tokens=2, temperature=0), CallOptions(cache_salt=cache_salt)
            pieces = list(client.generate(list(prompts.prompt(64, seed=seed)), sampling, options))
        assert pieces[-1].usage is not None
        return pieces[-1].usage.cached_tokens

    def work(self, seed: int, key: str) -> dict[str, int]:
        """What one request of a tenant made all workers do, and what the router knew of it."""
        before = self._counters()
        label = f"work-{seed}-{key}"
        values = {"prompt": list(prompts.prompt(64, seed=seed)), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        headers = {**bearer(key), "x-request-id": label}
        reply = httpx.post(f"{self.url}/v1/completions", json=values, headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        asyncio.run(self.cluster.idle())
        grown = {name: count - before[name] for name, count in self._counters().items()}
        shown = httpx.get(f"{self.url}/debug/requests/{label}", headers=bearer("ops")).json()
        started = next(e for e in shown["events"] if e["name"] == "prefill_started")
        cached_blocks = started.get("detail", {}).get("cached_blocks", 0)
        held = [c.get("held_blocks", 0) for a in shown["attempts"] for c in a["decision"]["candidates"]]
        return {**grown, "bytes": shown["bytes_moved"], "cached_blocks": cached_blocks, "held": max(held)}

    def _counters(self) -> dict[str, int]:
        rows = httpx.get(f"{self.cluster.url}/v1/cluster").json()["workers"]
        names = {
            "computed": "prompt_tokens_computed",
            "cached": "prompt_tokens_cached",
            "forwarded": "tokens_forwarded",
        }
        names |= {name: name for name in ("tokens_forwarded", "pulls", "pulled_blocks")}
        return {short: sum(row[name] for row in rows) for short, name in names.items()}


@pytest.fixture(scope="module")
def doors(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("tenants")
    cluster = Cluster(folder, default_model_folder, settings={"transfer.transport": "tcp"})
    asyncio.run(cluster.start())
    try:
        http_port, grpc_port = free_ports(2)
        settings = {
            "router.port": http_port,
            "router.grpc_port": grpc_port,
            "access.keys_file": str(write_keys(folder)),
        }
        cluster._spawn("router-keys", ["services.router"], cluster._config(settings))
        doors = Doors(cluster, http_port, grpc_port)
        asyncio.run(_ready(doors))
        yield doors
    finally:
        asyncio.run(cluster.stop())


async def _ready(doors: Doors) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
        while True:
            try:
                if (await client.get(f"{doors.url}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


def test_each_tenant_hits_its_own_and_nobody_elses(doors: Doors) -> None:
    for key in ("alice", "bob"):
        assert [doors.cached(1, key), doors.cached(1, key)] == [0, CACHED]
    assert doors.cached(1) == 0, "nor does who comes without a key"
    assert doors.cached_by_grpc(1, "alice") == CACHED, "over gRPC it is the same tenant"
    assert doors.cached_by_grpc(1, "slowly") == 0


@pytest.mark.parametrize("salt", ["a", "b", "red", "blue", "tiny"])
def test_each_salt_is_a_cache_of_its_own_within_a_tenant(doors: Doors, salt: str) -> None:
    assert [doors.cached(2, "alice", cache_salt=salt), doors.cached(2, "alice", cache_salt=salt)] == [0, CACHED]
    assert doors.cached(2, "bob", cache_salt=salt) == 0


def test_no_text_of_a_client_is_another_tenants_salt(doors: Doors) -> None:
    assert doors.cached(3, "alice") == 0
    assert doors.cached(3, "alice", cache_salt="s") == 0
    assert doors.cached_by_grpc(5, "alice") == doors.cached_by_grpc(5, "alice", "s") == 0
    for forged in ("red", block_salt("red", ""), block_salt("red", "s"), "red\x00s"):
        assert doors.cached(3, "bob", cache_salt=forged) == 0
        assert doors.cached(3, cache_salt=forged) == 0
        assert doors.cached_by_grpc(5, "bob", forged) == 0
    for label in ({"prompt_cache_key": "red"}, {"user": "red"}, {"metadata": {"tenant": "red"}}):
        doors.cached(3, "bob", **label)
    assert doors.cached(4, "alice", prompt_cache_key="k") == 0
    assert doors.cached(4, "bob", prompt_cache_key="k") == 0


def test_cve_2025_46570_what_another_tenant_computed_changes_no_work_that_time_could_tell(doors: Doors) -> None:
    """A prompt that another tenant has in every cache, and one that nobody ever sent, cost a tenant the same work on
    every worker, move the same bytes, and look the same to the router's choice; its own second one does not."""
    assert doors.work(20, "alice") == doors.work(21, "alice") != doors.work(20, "alice")
    known, fresh = doors.work(20, "bob"), doors.work(22, "bob")
    assert known == fresh
    assert known["computed"] == 64
    assert known["cached"] == known["pulls"] == known["pulled_blocks"] == known["cached_blocks"] == 0
    assert doors.work(20, "bob")["cached"] == CACHED, "its own is found"
