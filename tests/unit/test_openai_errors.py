"""Refusals and failures over real sockets: always the OpenAI form, and the right status while there still is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from services.protocol.errors import ErrorCode, RequestError
from tests.fronts import FakeCore, client_of, failing, make_core, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCore, httpx.AsyncClient]]:
    """One router for all tests of this file."""
    core = make_core(tmp_path_factory.mktemp("model"))
    async with running(core) as fronts, client_of(fronts) as client:
        yield core, client


@pytest.fixture
def core(served: tuple[FakeCore, httpx.AsyncClient]) -> FakeCore:
    served[0].forget()
    return served[0]


@pytest.fixture
def http(served: tuple[FakeCore, httpx.AsyncClient]) -> httpx.AsyncClient:
    return served[1]


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(body: str) -> list[Any]:
    """Every event of a stream; [DONE] as it is."""
    data = [block.removeprefix("data: ") for block in body.split("\n\n") if block and not block.startswith(":")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return dict(error)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"{}", 415, "unsupported_media_type"),
        ({"content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ({"content-type": "application/json; charset=latin-1"}, b"{}", 415, "unsupported_media_type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"{}", 415, "unsupported_media_type"),
        ({"content-type": "application/json"}, b"[]", 400, "invalid_request"),
        ({"content-type": "application/json"}, b"", 400, "invalid_request"),
        ({"content-type": "application/json"}, b'{"temperature":NaN}', 400, "invalid_request"),
        ({"content-type": "application/json"}, b'{"model":"no-such"}', 404, "model_not_found"),
    ],
)
async def test_a_bad_body_is_an_openai_error(
    http: httpx.AsyncClient, path: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    response = await http.post(path, content=body, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_a_body_past_the_limit_is_413_and_names_the_setting(tmp_path: Path) -> None:
    core = make_core(tmp_path, router={"max_body_bytes": 1000})
    async with running(core) as fronts, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{fronts.http_port}{CHAT}"
        headers = {"content-type": "application/json"}
        for content in (b"x" * 1001, b"x" * 5_000_000):
            response = await client.post(url, content=content, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
            assert "router.max_body_bytes" in error_of(response)["message"]

        async def pieces() -> AsyncIterator[bytes]:  # no content-length
            for _ in range(20):
                yield b"x" * 100

        assert (await client.post(url, content=pieces(), headers=headers)).status_code == 413


async def test_a_route_that_is_not_there_and_a_wrong_method_are_openai_errors(http: httpx.AsyncClient) -> None:
    missing, wrong = await http.get("/v1/nothing"), await http.get(CHAT)
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_prompt_is_400_before_any_stream(
    core: FakeCore, http: httpx.AsyncClient, stream: bool
) -> None:
    for ids, extra in (([5] * 256, {}), ([5] * 257, {}), ([5] * 2560, {}), ([5] * 200, {"max_tokens": 57})):
        response = await http.post(TEXT, json={"prompt": ids, "stream": stream, **extra})
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert str(len(ids)) in error_of(response)["message"]
        assert "256" in error_of(response)["message"]
    assert (await http.post(TEXT, json={"prompt": [5] * 200, "max_tokens": 56})).status_code == 200
    assert len(core.flow.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.NO_WORKERS, ErrorCode.INVALID_REQUEST])
async def test_an_error_before_the_first_token_is_a_plain_status(
    core: FakeCore, http: httpx.AsyncClient, stream: bool, code: ErrorCode
) -> None:
    error = RequestError(code, "not now", retry_after_s=0.25 if code is ErrorCode.OVERLOADED else None)
    core.flow.script = failing(error)
    response = await http.post(CHAT, json={"messages": HI, "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (error.status.http, str(code))
    assert response.headers.get("retry-after") == ("1" if error.retry_after_s else None)
    assert response.headers.get("retry-after-ms") == ("250" if error.retry_after_s else None)


async def test_a_failure_in_a_stream_is_an_error_event_and_then_done(
    core: FakeCore, http: httpx.AsyncClient, sdk: openai.AsyncOpenAI
) -> None:
    core.flow.script = failing(RequestError(ErrorCode.WORKER_LOST, "the decode worker is gone"), after="Hello wor")
    events = events_of((await http.post(CHAT, json={"messages": HI, "stream": True})).text)
    assert events[-2]["error"]["code"] == "worker_lost"
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2]) == "Hello wor"
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in await sdk.chat.completions.create(model="tiny", messages=HI, stream=True):
            pass
    whole = await http.post(CHAT, json={"messages": HI})
    assert (whole.status_code, error_of(whole)["code"]) == (503, "worker_lost")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_prompt_ends_the_others(core: FakeCore, http: httpx.AsyncClient, stream: bool) -> None:
    async def script(request: Any) -> AsyncIterator[Any]:
        if len(request.prompt_ids) == 2:
            raise RequestError(ErrorCode.NEVER_FITS, "too big")
        await asyncio.Event().wait()
        yield

    core.flow.script = script
    response = await http.post(TEXT, json={"prompt": [[5], [5, 6], [7]], "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (400, "exceeds_kv_capacity")
    assert sorted(core.flow.ends.values()) == ["cancelled", "cancelled", "error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_behind_the_front_is_a_500_that_tells_nothing(
    core: FakeCore, http: httpx.AsyncClient, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(_request: Any) -> AsyncIterator[Any]:
        raise ZeroDivisionError("secret detail")
        yield

    core.flow.script = script
    response = await http.post(CHAT, json={"messages": HI, "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    assert core.timelines.find(core.flow.requests[0].request_id).outcome == "internal_error"  # type: ignore[union-attr]
