"""Keys, scopes and limits over HTTP: every route of the app, the OpenAI client, and what a tenant sees of another."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from services.access_config import LimitsConfig
from services.router.access.guard import REASONS
from services.router.access.scopes import ADMINISTER, http_rule
from services.router.openai_http import build_http_app
from services.router.serve import Fronts
from services.telemetry.metrics import RouterMetrics
from tests.access import KEYS, bearer, with_keys
from tests.fronts import FakeCore, error_of, failing, hanging, make_core, running, saying, until

OPEN = {"/health", "/ready"}
DEBUG = {"/debug/requests/x", "/debug/steps", "/debug/trace"}


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return with_keys(make_core(tmp_path), tmp_path)


@pytest.fixture
async def app(core: FakeCore) -> AsyncIterator[FastAPI]:
    made = build_http_app(core)
    yield made
    made.state.front.close()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as made:
        yield made


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route, with something in place of parameters."""
    found = [(m, re.sub(r"{[^}]*}", "x", r.path)) for r in app.routes if isinstance(r, Route) for m in r.methods or ()]
    assert len(found) >= 10
    return sorted(found)


async def test_cve_2026_22778_without_a_key_no_route_answers_but_health(
    app: FastAPI, client: httpx.AsyncClient, core: FakeCore
) -> None:
    for method, path in [*routes_of(app), ("GET", "/nothing"), ("POST", "/invocations"), ("GET", "//v1/models")]:
        for headers in ({}, bearer("mallory"), {"authorization": "Basic YWxpY2Uta2V5"}, {"x-api-key": "alice"}):
            reply = await client.request(method, path, headers=headers)
            if path in OPEN:
                assert reply.status_code == 200, path
                continue
            assert reply.status_code == 401, (method, path)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "x-request-id" in reply.headers
            if method != "HEAD":
                assert reply.json()["error"]["type"] == "authentication_error"
                assert "mallory" not in reply.text
            if path == "/v1/models":
                assert error_of(reply)["code"] == "invalid_api_key"
    assert core.flow.requests == []


async def test_every_route_answers_the_scopes_that_its_rule_names(app: FastAPI, client: httpx.AsyncClient) -> None:
    scopes = {name: set(about.get("scopes", ["infer"])) for name, about in KEYS.items() if name != "slowly"}
    for method, path in routes_of(app):
        rule = http_rule(method, path)
        for name, has in scopes.items():
            reply = await client.request(method, path, headers=bearer(name), content=b"{}")
            allowed = rule.scopes is None or has & rule.scopes
            assert (reply.status_code == 403) == (not allowed), (method, path, name, reply.text[:200])
            assert reply.status_code != 401
    by_default = {path for method, path in routes_of(app) if http_rule(method, path) is ADMINISTER}
    assert by_default <= {"/v1/cluster", *DEBUG}, "give a new route a rule in scopes.py"


async def test_without_keys_everything_is_open(tmp_path: Path) -> None:
    app = build_http_app(make_core(tmp_path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        assert (await client.get("/v1/cluster")).status_code == 200
        reply = await client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 200
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]
    app.state.front.close()


async def test_a_key_comes_in_the_openai_or_the_anthropic_form(client: httpx.AsyncClient) -> None:
    for headers in (bearer("alice"), {"Authorization": "bearer  alice-key"}, {"x-api-key": "alice-key"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    both = {"authorization": "Bearer nobody", "x-api-key": "alice-key"}
    assert (await client.get("/v1/models", headers=both)).status_code == 401


async def test_the_app_below_a_prefix_has_the_same_rules(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app=app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/cluster")).status_code == 401
        assert (await client.get("/llm/v1/cluster", headers=bearer("alice"))).status_code == 403


async def test_the_tenant_comes_from_the_key_and_not_from_the_client(client: httpx.AsyncClient, core: FakeCore) -> None:
    body = {"prompt": "x", "cache_salt": "s", "prompt_cache_key": "blue", "user": "blue", "tenant": "blue"}
    for name in ("alice", "bob"):
        assert (await client.post("/v1/completions", json=body, headers=bearer(name))).status_code == 200
    assert [(r.tenant, r.salt) for r in core.flow.requests] == [("red", "s"), ("blue", "s")]


async def test_limits_answer_429_with_openais_headers(client: httpx.AsyncClient, core: FakeCore) -> None:
    send = lambda: client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("slowly"))  # noqa: E731
    replies = [await send() for _ in range(3)]
    assert [r.status_code for r in replies] == [200, 200, 429]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in replies] == ["1", "0", "0"]
    assert {r.headers["x-ratelimit-limit-requests"] for r in replies} == {"2"}
    assert {r.headers["x-ratelimit-limit-tokens"] for r in replies} == {"1000"}
    assert re.fullmatch(r"\d+(\.\d+)?m?s", replies[2].headers["x-ratelimit-reset-requests"])
    assert 1 <= int(replies[2].headers["retry-after"]) <= 30
    error = error_of(replies[2])
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "requests_per_minute" in error["message"]
    assert (await client.get("/v1/models", headers=bearer("slowly"))).status_code == 200, "reading is not counted"


async def test_tokens_of_prompt_and_answer_are_counted(tmp_path: Path) -> None:
    core = with_keys(make_core(tmp_path), tmp_path, tokens_per_minute=40)
    core.flow.script = saying("Hello world and more of it")
    app = build_http_app(core)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        post = lambda ids: client.post("/v1/completions", json={"prompt": ids}, headers=bearer("alice"))  # noqa: E731
        too_long = await post([5] * 41)
        assert too_long.status_code == 429
        assert "41 tokens" in error_of(too_long)["message"]
        assert "retry-after" not in too_long.headers
        first = await post([5] * 30)
        assert first.status_code == 200
        usage = first.json()["usage"]
        meter = app.state.front.guard._tenants["red"].tokens
        assert meter._level == pytest.approx(40 - usage["total_tokens"], abs=0.5)
        again = await post([5] * 30)
        assert again.status_code == 429
        assert "retry-after" in again.headers
        assert (
            await client.post("/v1/completions", json={"prompt": [5] * 30}, headers=bearer("bob"))
        ).status_code == 200
    app.state.front.close()


async def test_a_stream_counts_as_running_to_its_end_and_a_failure_lets_go(tmp_path: Path) -> None:
    core = with_keys(make_core(tmp_path), tmp_path)
    core.flow.script = hanging("Hi")
    async with (
        running(core) as fronts,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{fronts.http_port}", trust_env=False) as client,
    ):
        stream = {"prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=stream, headers=bearer("slowly")) as held:
            assert held.status_code == 200
            reply = await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("slowly"))
            assert reply.status_code == 429
            assert "concurrency" in error_of(reply)["message"]
            assert reply.headers["retry-after"] == "1"
        meter = fronts.front.guard._key_meters["slowly"]
        await until(lambda: meter.running == 0)
        core.flow.script = failing(ValueError("no"))  # type: ignore[arg-type]
        assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("slowly"))).status_code == 500
        assert meter.running == 0


async def test_the_openai_client_works_with_a_key_and_names_its_errors(tmp_path: Path) -> None:
    core = with_keys(make_core(tmp_path), tmp_path)
    async with running(core) as fronts:

        def connect(key: str) -> openai.AsyncOpenAI:
            http = httpx.AsyncClient(trust_env=False)
            base = f"http://127.0.0.1:{fronts.http_port}/v1"
            return openai.AsyncOpenAI(api_key=key, base_url=base, max_retries=0, http_client=http)

        async with connect("alice-key") as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            assert text == "Hello world"
        async with connect("nobody") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with connect("probe-key") as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.models.list()
        async with connect("slowly-key") as client:
            for _ in range(2):
                await client.completions.create(model="tiny", prompt="x")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="tiny", prompt="x")
            assert caught.value.code == "rate_limit_exceeded"


async def test_administrators_are_audited_and_nobodys_key_or_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    core = with_keys(make_core(tmp_path), tmp_path, audit_file=str(path))
    async with (
        running(core) as fronts,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{fronts.http_port}", trust_env=False) as client,
    ):
        await client.get("/v1/cluster?secret=x", headers=bearer("ops"))
        await client.get("/debug/steps", headers=bearer("alice"))
        await client.get("/debug/steps", headers=bearer("nobody"))
        await client.post("/v1/completions", json={"prompt": "confidential"}, headers=bearer("alice"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(x["key"], x["action"], x["outcome"], x["peer"]) for x in lines]
    assert told == [
        ("ops", "GET /v1/cluster", "200", "127.0.0.1"),
        ("alice", "GET /debug/steps", "permission_denied", "127.0.0.1"),
    ]
    for secret in ("ops-key", "alice-key", "nobody-key", "confidential", "secret"):
        assert secret not in path.read_text()
        assert secret not in caplog.text


async def test_limits_of_a_request_hold_over_http(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.config = replace(core.config, limits=LimitsConfig(stops=1, prompts=1, messages=1))
    app = build_http_app(core)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        for path, body in (
            ("/v1/completions", {"prompt": ["x", "y"]}),
            ("/v1/completions", {"prompt": "x", "stop": ["a", "b"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 2}),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 400
            assert "(limits." in error_of(reply)["message"]
    assert core.flow.requests == []
    app.state.front.close()


async def test_cve_2025_61620_a_slow_template_is_given_up_and_holds_up_nobody(tmp_path: Path) -> None:
    slow = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}x"
    core = make_core(tmp_path, chat_template=slow)
    core.config = replace(core.config, limits=LimitsConfig(text_s=0.05))
    app = build_http_app(core)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 7 * 7 }}"}
        slowed = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        reply = await slowed
        assert reply.status_code in (400, 503), "a user's template is refused or ignored, ours is given up"
        assert reply.status_code == 400 or "limits.text_s" in error_of(reply)["message"]
        del body["chat_template"]
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 503
        assert "limits.text_s" in error_of(reply)["message"]
    app.state.front.close()


def test_fronts_have_one_guard(tmp_path: Path) -> None:
    async def main() -> Fronts:
        async with running(with_keys(make_core(tmp_path), tmp_path)) as fronts:
            assert fronts.http_app.state.front is fronts.front
            return fronts

    asyncio.run(main())


async def test_callers_that_are_turned_away_are_counted_by_reason_and_by_nothing_else(
    client: httpx.AsyncClient, core: FakeCore
) -> None:
    for _ in range(3):
        await client.get("/v1/models")
    await client.get("/v1/models", headers=bearer("mallory"))
    await client.get("/v1/cluster", headers=bearer("alice"))
    await client.get("/health")
    body = {"messages": [{"role": "user", "content": "x"}]}
    for _ in range(3):
        await client.post("/v1/chat/completions", headers=bearer("slowly"), json=body)
    assert core.refused == {"missing": 3, "unknown": 1, "scope": 1, "limit": 1}
    assert set(core.refused) <= set(REASONS)


def test_the_metric_of_refused_callers_holds_no_key() -> None:
    metrics = RouterMetrics()
    for reason in REASONS:
        metrics.key_refusals.labels(reason).inc()
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("pdray_key_refusals_total")]
    assert sorted(lines) == sorted(f'pdray_key_refusals_total{{reason="{reason}"}} 1.0' for reason in REASONS)
