"""Settings that a running router takes over: what Serve's `user_config` may hold, and what it changes at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.errors import ConfigError
from services.config import AccessConfig, ServeConfig, load, to_dict
from services.live_config import LIVE, difference, with_live
from services.router.deployment import RouterReplica, deployment
from services.router.main import start_router
from tests.fronts import make_card

BUILT = load(None, {"slo.ttft_ms": 900, "admission.max_waiting": 7, "redis.url": "none", "secret": "s" * 48}, {})


class TestWithLive:
    def test_every_live_name_is_a_setting(self) -> None:
        tree = to_dict(ServeConfig())
        assert [f"{s}.{n}" for s, names in LIVE.items() for n in names if n not in tree[s]] == []

    def test_sections_and_dotted_names_mean_the_same(self) -> None:
        nested = with_live(BUILT, {"slo": {"ttft_ms": 300}, "router": {"policy": "least-loaded"}})
        dotted = with_live(BUILT, {"slo.ttft_ms": "300", "router.policy": "least-loaded"})
        assert nested == dotted
        assert difference(BUILT, nested) == {"slo.ttft_ms": 300, "router.policy": "least-loaded"}

    def test_what_a_reload_leaves_out_is_as_it_was_built(self) -> None:
        assert with_live(BUILT, {}) == BUILT
        assert with_live(BUILT, {"admission": {"max_waiting": 9}}).slo.ttft_ms == 900

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"engine": {"block_size": 32}}, r"^engine\.block_size cannot be changed by user_config"),
            ({"router": {"port": 1}}, r"^router\.port cannot"),
            ({"slo": {"ttft": 300}}, r"^slo\.ttft cannot"),
            ({"slo": 300}, r"^slo cannot"),
            ({"slo": {"ttft_ms": -1}}, r"^slo\.ttft_ms must not be negative"),
            ({"slo": {"ttft_ms": "soon"}}, r"^slo\.ttft_ms must be of type float"),
            ({"router": {"policy": "luck"}}, r"^router\.policy must be"),
            ({3: 4}, r"^3 is not a setting"),
        ],
        ids=str,
    )
    def test_anything_else_is_refused_by_its_path(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            with_live(BUILT, given)


class Replica(RouterReplica):
    """Without Serve, which awaits the destructor."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@asynccontextmanager
async def replica(folder: Path, config: ServeConfig) -> AsyncIterator[tuple[RouterReplica, httpx.AsyncClient]]:
    """A router replica as Serve makes it, but for the workers that it would ask Ray for."""
    made = Replica.__new__(Replica)
    made._router = router = await start_router(config, folder)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}") as client:
            yield made, client
    finally:
        await router.stop(0.0)


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    make_card(tmp_path)
    given = {"redis.url": "none", "secret": "s" * 48, "router.port": 0, "router.grpc_port": 0}
    return load(None, given, {})


async def complete(client: httpx.AsyncClient, stops: int = 1) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "stop": ["x"] * stops})


async def test_limits_count_from_the_reload_on_and_an_empty_one_takes_them_back(
    tmp_path: Path, config: ServeConfig
) -> None:
    async with replica(tmp_path, config) as (router, client):
        await router.reconfigure({})
        assert (await complete(client, stops=2)).status_code == 503  # it passes every limit; there are no workers
        await router.reconfigure({"limits": {"stops": 1}})
        refused = await complete(client, stops=2)
        assert refused.status_code == 400
        assert "limits.stops" in refused.json()["error"]["message"]
        shown = (await client.get("/v1/cluster")).json()["settings"]
        assert shown == {"reloaded": {"limits.stops": 1}, "refused": ""}
        await router.reconfigure({})
        assert (await complete(client, stops=2)).status_code == 503
        assert (await client.get("/v1/cluster")).json()["settings"]["reloaded"] == {}


async def test_limits_of_everybody_come_and_go_with_a_reload(tmp_path: Path, config: ServeConfig) -> None:
    async with replica(tmp_path, config) as (router, client):
        await router.reconfigure({"access": {"requests_per_minute": 1}})
        assert [(await complete(client)).status_code for _ in range(2)] == [503, 429]
        await router.reconfigure({})
        assert (await complete(client)).status_code == 503


async def test_a_tenants_bucket_stays_as_empty_as_it_is_when_the_limits_change(
    tmp_path: Path, config: ServeConfig
) -> None:
    from services.router.access.guard import Guard
    from services.router.access.keys import sha256_of
    from services.router.access.scopes import WORK

    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: a, hash: '{sha256_of('key')}', tenant: t}}]", encoding="utf-8")
    guard = Guard(AccessConfig(keys_file=str(file)), clock=lambda: 0.0)
    before = await guard.caller("key", WORK)
    guard.set_defaults(AccessConfig(keys_file=str(file), concurrency=3))
    after = await guard.caller("key", WORK)
    assert list(after.meters) == list(before.meters), "the same buckets"
    assert guard.wants_keys


async def test_targets_policy_and_the_queues_bounds_are_read_anew(tmp_path: Path, config: ServeConfig) -> None:
    async with replica(tmp_path, config) as (replica_, _):
        assert replica_._router is not None
        core = replica_._router.core
        live = {"slo": {"ttft_ms": 50}, "router": {"policy": "round-robin"}, "admission": {"max_waiting": 3}}
        await replica_.reconfigure(live)
        assert core.config is core._deps.config
        assert (core.config.slo.ttft_ms, core.config.router.policy) == (50, "round-robin")
        assert core._deps.gate._queue.max_requests == 3


async def test_a_bad_reload_changes_nothing_and_the_cluster_page_says_why(tmp_path: Path, config: ServeConfig) -> None:
    async with replica(tmp_path, config) as (router, client):
        await router.reconfigure({"limits": {"stops": 1}})
        await router.reconfigure({"limits": {"stops": 0}})
        shown = (await client.get("/v1/cluster")).json()["settings"]
        assert shown["reloaded"] == {"limits.stops": 1}
        assert shown["refused"].startswith("limits.stops must be positive")
        assert (await complete(client, stops=2)).status_code == 400
        await router.reconfigure({})
        assert (await client.get("/v1/cluster")).json()["settings"] == {"reloaded": {}, "refused": ""}


async def test_a_bad_one_at_the_start_fails_the_start_and_one_after_the_end_is_nothing(
    tmp_path: Path, config: ServeConfig
) -> None:
    async with replica(tmp_path, config) as (router, _):
        with pytest.raises(ConfigError, match=r"limits\.promts cannot"):
            await router.reconfigure({"limits": {"promts": 1}})
    stopped = Replica.__new__(Replica)
    await stopped.reconfigure({"limits": {"stops": 0}})


def test_serve_calls_it_at_every_start() -> None:
    assert deployment(BUILT).user_config == {}, "without one Serve would call it at a change only"


def test_the_page_lists_every_live_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text(encoding="utf-8")
    rows = page.split("<!-- live -->")[1].split("<!-- /live -->")[0].strip().splitlines()[2:]
    assert rows == [f"| `{section}` | {', '.join(f'`{name}`' for name in names)} |" for section, names in LIVE.items()]
