"""Published weaknesses of servers like this one, as far as they touch a front door: each a test that bears its name.

Others of the kind stand with what they are about: CVE-2025-59425 in test_access_keys, CVE-2026-22778 (routes) and
CVE-2025-61620 (slow templates) in test_access_http, CVE-2026-34756 (sizes) in test_access_keys.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from fastapi import FastAPI

from kvstore.blocks import NAME_BYTES, block_names, extend_name, namespace_root
from services.access_config import AccessConfig
from services.protocol.client import AsyncPdrayClient
from services.protocol.errors import ErrorCode, RequestError
from services.router.access.tenancy import block_salt
from services.router.openai_http import build_http_app
from tests.fronts import FakeCore, error_of, failing, make_core, running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return make_core(tmp_path)


@pytest.fixture
async def app(core: FakeCore) -> AsyncIterator[FastAPI]:
    made = build_http_app(core)
    yield made
    made.state.front.close()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as made:
        yield made


def root(tenant: str, cache_salt: str) -> bytes:
    salt = block_salt(tenant, cache_salt)
    return namespace_root(salt=salt, model="m", tokenizer="t", dtype="float32", block_size=4, layout_version=1)


async def test_cve_2025_47277_the_ports_listen_where_they_are_told_to(core: FakeCore) -> None:
    async with running(core) as fronts:
        ports = {fronts.http_port, fronts.grpc_port}
        found = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {address.port for address in found} >= ports
        assert {address.ip.removeprefix("::ffff:") for address in found if address.port in ports} == {"127.0.0.1"}


async def test_cve_2025_62164_no_tensor_of_a_client_is_ever_read(client: httpx.AsyncClient, core: FakeCore) -> None:
    tensor = base64.b64encode(b"PK\x03\x04 a zip with a pickle").decode()
    for body in ({"prompt_embeds": tensor}, {"prompt_embeds": [tensor], "model": "tiny"}):
        assert (await client.post(COMPLETION, json=body)).status_code == 400
    reply = await client.post(COMPLETION, json={"prompt": "x", "prompt_embeds": tensor})
    assert reply.status_code == 400 or "prompt_embeds" in reply.headers["x-pdray-ignored"]


def test_cve_2025_25183_names_of_blocks_are_digests_that_no_process_seeds() -> None:
    code = "from kvstore.blocks import *; print(block_names(range(8), 4, bytes(16))[-1].hex())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert told == {block_names(range(8), 4, bytes(16))[-1].hex().encode() + b"\n"}
    assert NAME_BYTES * 8 >= 128


def test_cve_2025_46570_no_tenant_shares_a_name_of_a_block_with_another() -> None:
    """Nor by a salt that is another's name or digest, nor by an adapter or an image that is called as a salt."""
    tenants = ("", "red", "blue")
    salts = ("", "red", "blue", block_salt("red", ""), block_salt("red", "s"), "s")
    names: list[bytes] = []
    for tenant in tenants:
        for salt in salts:
            start = root(tenant, salt)
            names += block_names(range(8), 4, start)
            names += [extend_name(start, range(4), [(kind, b"red")]) for kind in ("adapter", "image")]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "scheme", ["http://127.0.0.1:{port}/x.png", "http:\\\\127.0.0.1:{port}/x.png", "file:///etc/passwd"]
)
async def test_cve_2025_6242_no_address_that_a_client_names_is_fetched(client: httpx.AsyncClient, scheme: str) -> None:
    """Nor CVE-2026-24779, where two parsers read one address differently."""
    called = asyncio.Event()

    async def serve(_reader: Any, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = scheme.format(port=server.sockets[0].getsockname()[1])
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = await client.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
        assert reply.status_code == 400
        assert not called.is_set()
        assert "root:" not in reply.text


async def test_cve_2026_22778_no_error_tells_an_address_in_memory(client: httpx.AsyncClient, core: FakeCore) -> None:
    core.flow.script = failing(ValueError(f"cannot identify {object()!r}"))  # type: ignore[arg-type]
    reply = await client.post(COMPLETION, json={"prompt": "x"})
    assert reply.status_code == 500
    assert "0x" not in reply.text
    async with running(core) as fronts, AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}") as rpc:
        with pytest.raises(RequestError) as caught:
            async for _ in rpc.generate("x"):
                pass
    assert caught.value.code is ErrorCode.INTERNAL
    assert "0x" not in caught.value.message


@pytest.mark.parametrize("field", ["n", "best_of", "logprobs", "top_logprobs", "max_tokens", "prompt_logprobs"])
async def test_cve_2026_34756_no_number_of_a_client_sizes_anything(client: httpx.AsyncClient, field: str) -> None:
    for path, body in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        for number in (10**9, 2**31 - 1, 2**62):
            reply = await client.post(path, json={**body, "logprobs": path == CHAT or 1, field: number})
            assert reply.status_code == 400, reply.text


DEEP: Any = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BAD_GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "((a+)+)+$" + "(" * 50},
    {"guided_regex": "a" * 5000},
    {"guided_regex": "[" * 100},
    {"guided_json": DEEP},
    {"guided_json": {"$ref": "#/nowhere"}},
    {"guided_json": {"type": "no-such"}},
    {"guided_json": {"enum": list(range(5000))}},
    {"guided_json": {"pattern": "(", "type": "string"}},
    {"guided_grammar": "("},
    {"guided_choice": ["x"] * 5000 + [str(i) for i in range(5000)]},
]


@pytest.mark.parametrize("body", BAD_GRAMMARS, ids=lambda body: next(iter(body)))
async def test_cve_2025_48944_a_bad_grammar_is_a_400(
    client: httpx.AsyncClient, core: FakeCore, body: dict[str, Any]
) -> None:
    """Likewise CVE-2025-48942, -48943, -29770 and GHSA-9q5r-wfvf-rr7f."""
    reply = await client.post(COMPLETION, json={"prompt": "x", **body})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["code"] in ("invalid_request", "not_yet_supported")
    assert core.flow.requests == []
    assert (await client.get("/health")).status_code == 200


async def test_cve_2025_62426_a_client_brings_no_template_and_no_variable_of_the_renderer(
    client: httpx.AsyncClient, core: FakeCore
) -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }} {% for x in range(10**9) %}{% endfor %}"}]
    reply = await client.post(CHAT, json={"messages": messages})
    assert reply.status_code == 200, "text of a message is text"
    expected = core.flow.requests[0].prompt_ids
    for more in (
        {"chat_template": "{{ 7 * 7 }}"},
        {"chat_template_kwargs": {"messages": [], "chat_template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"tokenize": True, "add_generation_prompt": False, "raise_exception": 1}},
    ):
        reply = await client.post(CHAT, json={"messages": messages, **more})
        assert reply.status_code in (200, 400), reply.text
    for request in core.flow.requests[1:]:
        shorter = expected[: len(request.prompt_ids)]
        assert request.prompt_ids[: len(shorter)] == shorter, "only what the template itself offers may change"


async def test_cve_2026_27482_no_method_is_forgotten(client: httpx.AsyncClient) -> None:
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"):
        for path in ("/v1/models", COMPLETION, "/debug/steps", "/metrics"):
            assert (await client.request(method, path)).status_code in (404, 405)


async def test_cve_2025_62593_a_page_of_another_origin_gets_no_permission(client: httpx.AsyncClient) -> None:
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models")):
        reply = await client.request(method, path, headers=origin)
        assert not [name for name in reply.headers if name.startswith("access-control-")]
    plain = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain", **origin})
    assert plain.status_code == 415, "what a form could send is refused"


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"])
async def test_cve_2025_62593_a_name_that_was_made_to_point_here_is_turned_away(
    client: httpx.AsyncClient, core: FakeCore, host: str
) -> None:
    """DNS rebinding: the page and this router are one origin to the browser, so only the name tells."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/debug/steps"), ("GET", "/x")):
        reply = await client.request(method, path, headers={"host": host}, json=body if method == "POST" else None)
        assert (reply.status_code, error_of(reply)["code"]) == (403, "permission_denied")
        assert "x-request-id" in reply.headers
    assert core.flow.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "a.localhost", "[::1]:8000"])
async def test_names_of_this_machine_and_addresses_are_served(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("access", "host"), [({"hosts": ("llm.example",)}, "127.0.0.1"), ({"hosts": ("*",)}, "127.0.0.1"), ({}, "0.0.0.0")]
)
async def test_a_router_that_others_may_reach_serves_the_names_it_is_given(
    core: FakeCore, access: dict[str, Any], host: str
) -> None:
    router = dataclasses.replace(core.config.router, host=host)
    core.config = dataclasses.replace(core.config, access=AccessConfig(**access), router=router)
    made = build_http_app(core)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=made), base_url="http://llm.example") as client:
        assert (await client.get("/v1/models")).status_code == 200
    made.state.front.close()


async def test_cve_2026_9540_no_body_and_no_message_ends_the_server(client: httpx.AsyncClient, core: FakeCore) -> None:
    """The rest is test_grpc_fuzz, and the cases over HTTP."""
    for content in (b"", b"null", b"[]", b"{" * 10_000, b'{"prompt": 1e400}', b"\xff\xfe", b'{"messages": {}}'):
        for path in (CHAT, COMPLETION):
            reply = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 400
    async with running(core) as fronts:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fronts.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in channel.unary_stream("/pdray.v1.Inference/Generate")(b"\xff" * 100):
                    pass
        async with AsyncPdrayClient(f"127.0.0.1:{fronts.grpc_port}") as rpc:
            assert [p async for p in rpc.generate("x")]
