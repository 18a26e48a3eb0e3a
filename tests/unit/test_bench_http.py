"""The load client's HTTP: kept connections, answers cut anywhere, and servers that do not keep to the rules."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvstore.errors import ConfigError
from services.bench.load.http import MAX_KEPT_BYTES, HttpError, Pool, Target
from services.bench.load.server import Server, find_server, server_phases

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
CLOSE = b""  # in a script: close the connection here


@asynccontextmanager
async def scripted(*connections: Sequence[bytes]) -> AsyncIterator[tuple[Pool, list[bytes]]]:
    """The k-th connection answers its requests with its items in turn; ``CLOSE`` closes it. Requests are noted."""
    requests: list[bytes] = []
    waiting = iter(connections)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for answer in next(waiting):
                if answer == CLOSE:
                    return
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(Target("127.0.0.1", server.sockets[0].getsockname()[1], "", False), time.monotonic, {"X-Key": "k"})
    try:
        yield pool, requests
    finally:
        await pool.close()
        server.close()
        async with asyncio.timeout(5):
            await ended.wait()


async def test_a_connection_is_used_again() -> None:
    async with scripted([OK, CHUNKED, OK]) as (pool, requests):
        assert [(await pool.get(f"/{i}")).text for i in range(3)] == ["hello"] * 3
    assert [r.split()[1] for r in requests] == [b"/0", b"/1", b"/2"]
    assert all(b"\r\nX-Key: k\r\n" in r for r in requests)


async def test_a_kept_connection_that_died_is_replaced_once() -> None:
    async with scripted([OK, CLOSE], [OK]) as (pool, requests):
        assert (await pool.get("/a")).text == "hello"
        assert (await pool.get("/b")).text == "hello"
    assert [r.split()[1] for r in requests if r] == [b"/a", b"/b"]


async def test_a_new_connection_that_dies_is_an_error() -> None:
    async with scripted([CLOSE]) as (pool, _):
        with pytest.raises(HttpError, match="closed after 0 bytes") as caught:
            await pool.get("/")
    assert caught.value.kind == "closed"


async def test_an_answer_cut_in_its_middle_is_an_error_that_says_where() -> None:
    async with scripted([b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", CLOSE]) as (pool, _):
        with pytest.raises(HttpError, match="closed after 4 bytes"):
            await pool.get("/")


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async with scripted([b"HTTP/1.1 200 OK\r\n\r\nto the end", CLOSE], [OK]) as (pool, _):
        assert (await pool.get("/")).text == "to the end"
        assert (await pool.get("/")).text == "hello"


async def test_a_connection_that_is_to_be_closed_is_not_kept() -> None:
    closing = OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    async with scripted([closing], [OK]) as (pool, requests):
        for _ in range(2):
            assert (await pool.get("/")).text == "hello"
    assert len(requests) == 2


async def test_what_is_no_http_is_an_error() -> None:
    async with scripted([b"SSH-2.0-server\r\n"]) as (pool, _):
        with pytest.raises(HttpError) as caught:
            await pool.get("/")
    assert caught.value.kind == "no_http"


async def test_a_reader_that_refuses_the_body_ends_the_exchange() -> None:
    def refuse(_body: bytes, _at_s: float) -> None:
        raise ValueError("not what I asked for")

    async with scripted([OK]) as (pool, _):
        with pytest.raises(HttpError, match="ValueError: not what I asked for") as caught:
            await pool.ask(pool.target.request("GET", "/", {}, b""), refuse)
    assert caught.value.kind == "bad_answer"


async def test_a_body_goes_to_its_reader_and_an_error_is_kept() -> None:
    seen: list[bytes] = []
    refused = OK.replace(b"200 OK", b"503 Full")
    async with scripted([CHUNKED, refused]) as (pool, _):
        request = pool.target.request("GET", "/", {}, b"")
        first = await pool.ask(request, lambda body, _at_s: seen.append(body))
        second = await pool.ask(request, lambda body, _at_s: seen.append(body))
    assert (b"".join(seen), first.num_bytes, first.text) == (b"hello", 5, "")
    assert (second.status, second.text) == (503, "hello")


async def test_a_huge_error_is_kept_in_part_only() -> None:
    body = b"x" * (3 * MAX_KEPT_BYTES)
    answer = b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with scripted([answer]) as (pool, _):
        reply = await pool.get("/")
    assert reply.num_bytes == len(body)
    assert len(reply.body) < 2 * MAX_KEPT_BYTES


async def test_a_cancelled_exchange_closes_its_connection() -> None:
    async with scripted([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"], [OK]) as (pool, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pool.get("/")
        assert (await pool.get("/")).text == "hello"


def debug(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def test_phases_are_those_of_the_requests_that_the_server_still_knows() -> None:
    rows = [{"ttft_parts_ms": {"prefill": ms}, "rest_parts_ms": {"decode": 2 * ms}} for ms in (10, 30)]
    known = [debug(json.dumps(row).encode()) for row in rows]
    answers = [known[0], debug(b'{"error": {}}', b"404 No"), debug(b"no json"), known[1], CLOSE]
    async with scripted(answers) as (pool, requests):
        phases = await server_phases(pool, ["cmpl-a", "b", "c", "d", "e", "f"])
    assert phases is not None
    assert phases["requests"] == 2
    assert phases["parts_ms"]["prefill"] == {"mean": 20, "p50": 20, "p99": 29.8}
    assert phases["parts_ms"]["decode"]["mean"] == 40
    assert requests[0].startswith(b"GET /debug/requests/cmpl-a HTTP/1.1")


async def test_a_server_that_knows_no_request_has_no_phases() -> None:
    async with scripted([debug(b"{}", b"404 No")]) as (pool, _):
        assert await server_phases(pool, ["a"]) is None


@pytest.mark.parametrize(
    ("models", "asked", "found"),
    [
        ([{"id": "m", "owned_by": "pdray"}], None, Server("m", True)),
        ([{"id": "m", "owned_by": "vllm"}], None, Server("m", False)),
        ([{"id": "a"}, {"id": "b", "owned_by": "pdray"}], "b", Server("b", True)),
        ([], "x", Server("x", False)),
    ],
)
async def test_the_model_is_the_only_one_or_the_named_one(models: list[object], asked: str, found: Server) -> None:
    async with scripted([debug(json.dumps({"data": models}).encode())]) as (pool, _):
        assert await find_server(pool, asked, 5.0) == found


async def test_of_several_models_one_must_be_named() -> None:
    async with scripted([debug(b'{"data": [{"id": "a"}, {"id": "b"}]}')]) as (pool, _):
        with pytest.raises(ConfigError, match="--model is needed: the server has a, b"):
            await find_server(pool, None, 5.0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:81", Target("host", 81, "", False)),
        ("host:81", Target("host", 81, "", False)),
        ("http://host/v1/", Target("host", 80, "", False)),
        ("https://host/app/v1", Target("host", 443, "/app", True)),
        ("http://[::1]:9", Target("::1", 9, "", False)),
    ],
)
def test_a_base_url_is_understood(url: str, expected: Target) -> None:
    assert Target.parse(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://u:p@host", "http://h/?q=1"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        Target.parse(url)


def test_an_ipv6_host_is_written_in_brackets() -> None:
    assert b"\r\nHost: [::1]:9\r\n" in Target("::1", 9, "", False).request("GET", "/", {}, b"")
