"""Clients that leave, long silences, and a router that stops while answers are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from services.protocol.errors import ErrorCode, RequestError
from services.router import sse
from services.router.serve import PortInUse, serve_fronts
from services.router.types import TokenEvent
from tests.fronts import FakeCore, client_of, error_of, events_of, hanging, ids_of, make_core, running, saying, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return make_core(tmp_path)


async def post_raw(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request by hand, to be able to just close the socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("after", ["", "Hello wor"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(core: FakeCore, after: str, stream: bool) -> None:
    core.flow.script = hanging(after)
    async with running(core) as fronts:
        reader, writer = await post_raw(fronts.http_port, CHAT, {"messages": HI, "stream": stream})
        await until(lambda: len(core.flow.requests) == 1)
        if after and stream:
            await reader.readuntil(b'"content":"')
        await closed(writer)
        request_id = core.flow.requests[0].request_id
        await until(lambda: core.flow.ends.get(request_id) == "cancelled")
        await until(lambda: core.request_debug(request_id)["outcome"] == "cancelled")  # type: ignore[index]
        await until(lambda: len(fronts.http_app.state.live) == 0)


async def test_a_client_that_leaves_frees_all_its_prompts_and_only_its_own(core: FakeCore) -> None:
    core.flow.script = hanging("Hello")
    async with running(core) as fronts:
        ours = await post_raw(fronts.http_port, TEXT, {"prompt": ["a", "b", "c"], "stream": True})
        other = await post_raw(fronts.http_port, TEXT, {"prompt": "d", "stream": True})
        await until(lambda: len(core.flow.requests) == 4)
        await closed(ours[1])
        await until(lambda: len(core.flow.ends) == 3)
        kept = next(r for r in core.flow.requests if r.prompt_ids == ids_of("d"))
        assert kept.request_id not in core.flow.ends
        await closed(other[1])
        await until(lambda: len(core.flow.ends) == 4)


async def test_a_burst_of_leaving_clients_leaves_nothing_behind(core: FakeCore) -> None:
    core.flow.script = hanging("Hello world")
    async with running(core) as fronts:
        before = len(asyncio.all_tasks())
        for _ in range(4):
            pairs = [await post_raw(fronts.http_port, CHAT, {"messages": HI, "stream": True}) for _ in range(10)]
            for _, writer in pairs:
                await closed(writer)
        await until(lambda: len(fronts.http_app.state.live) == 0)
        await until(lambda: set(core.flow.ends.values()) <= {"cancelled"})
        await until(lambda: len(asyncio.all_tasks()) <= before)
        core.flow.script = saying("fine")
        async with client_of(fronts) as http:
            assert (await http.post(CHAT, json={"messages": HI})).json()["choices"][0]["message"]["content"] == "fine"


# --- silence ---


@pytest.fixture
def impatient(tmp_path: Path) -> FakeCore:
    """Pings at once and all the time."""
    return make_core(tmp_path, router={"first_wait_s": 0.01, "ping_s": 0.01})


def gated(gate: asyncio.Event, then: RequestError | None) -> Any:
    async def script(_request: Any) -> AsyncIterator[TokenEvent]:
        await gate.wait()
        if then is not None:
            raise then
        yield TokenEvent(token_ids=ids_of("late"), finish_reason="length")

    return script


async def test_a_long_prefill_gets_its_200_and_pings_before_the_first_token(impatient: FakeCore) -> None:
    gate, core = asyncio.Event(), impatient
    core.flow.script = gated(gate, None)
    async with (
        running(core) as fronts,
        client_of(fronts) as http,
        http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        received = ""
        async for text in response.aiter_text():
            received += text
            if received.count(": ping") >= 3:
                gate.set()
        assert "late" in received
        assert events_of(received)[-1] == "[DONE]"


async def test_an_error_after_the_early_200_is_an_error_event(impatient: FakeCore) -> None:
    gate, core = asyncio.Event(), impatient
    core.flow.script = gated(gate, RequestError(ErrorCode.DEADLINE_EXCEEDED, "no token in 60 s"))
    async with (
        running(core) as fronts,
        client_of(fronts) as http,
        http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as response,
    ):
        gate.set()
        events = events_of("".join([text async for text in response.aiter_text()]))
    assert events[-2]["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "[DONE]"


async def test_a_client_that_takes_nothing_is_dropped(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SEND_LIMIT_S", 0.05)

    async def flood(_request: Any) -> AsyncIterator[TokenEvent]:
        while True:
            yield TokenEvent(token_ids=ids_of("The quick brown fox ") * 20)
            await asyncio.sleep(0)

    core.flow.script = flood
    async with running(core) as fronts:
        _, writer = await post_raw(fronts.http_port, CHAT, {"messages": HI, "stream": True})
        await until(lambda: len(core.flow.ends) == 1)
        await closed(writer)


# --- load on the event loop ---


async def test_probes_and_streams_go_on_while_megabytes_are_tokenized(tmp_path: Path) -> None:
    slow = {"text_s": 60.0}  # a busy machine may need longer for a megabyte than one text has by default
    core = make_core(tmp_path, model={"max_model_len": 10_000_000}, limits=slow, max_model_len=10_000_000)
    core.flow.script = saying("ten tokens of a stream")
    async with running(core) as fronts, client_of(fronts) as http:
        huge = [asyncio.create_task(http.post(TEXT, json={"prompt": "a" * 800_000, "max_tokens": 1})) for _ in range(2)]
        answered = 0
        while not all(task.done() for task in huge) and answered < 200:
            assert (await http.get("/health")).status_code == 200
            assert (await http.post(TEXT, json={"prompt": "x", "stream": True})).status_code == 200
            answered += not all(task.done() for task in huge)
        assert answered >= 3
        assert [(await task).status_code for task in huge] == [200, 200]


# --- start and stop ---


async def test_stopping_waits_for_answers_and_frees_the_ports(core: FakeCore) -> None:
    gate = asyncio.Event()
    core.flow.script = gated(gate, None)
    fronts = await serve_fronts(core, core.config)
    async with client_of(fronts) as http:
        answer = asyncio.create_task(http.post(CHAT, json={"messages": HI}))
        await until(lambda: len(core.flow.requests) == 1)
        stopping = asyncio.create_task(fronts.stop(30))
        await until(lambda: fronts._http.should_exit)
        gate.set()
        assert (await answer).json()["choices"][0]["message"]["content"] == "late"
        await stopping
    for port in (fronts.http_port, fronts.grpc_port):
        socket.create_server(("127.0.0.1", port)).close()


async def test_past_the_drain_time_every_answer_ends_with_an_error(core: FakeCore) -> None:
    core.flow.script = hanging("Hello")
    fronts = await serve_fronts(core, core.config)
    async with client_of(fronts) as http:
        bodies = [{"messages": HI, "stream": True}] * 5 + [{"messages": HI}] * 2
        answers = [asyncio.create_task(http.post(CHAT, json=body)) for body in bodies]
        await until(lambda: len(core.flow.requests) == 7)
        await fronts.stop(0.05)
        for answer in answers[:5]:
            events = events_of((await answer).text)
            assert events[-2]["error"]["code"] == "overloaded"
            assert events[-1] == "[DONE]"
        for answer in answers[5:]:
            assert ((await answer).status_code, error_of(await answer)["code"]) == (503, "overloaded")
    assert set(core.flow.ends.values()) == {"cancelled"}


async def test_no_token_waits_for_the_acknowledgement_of_the_one_before(core: FakeCore) -> None:
    core.flow.script = hanging("Hello")
    async with running(core) as fronts:
        _, writer = await post_raw(fronts.http_port, CHAT, {"messages": HI, "stream": True})
        await until(lambda: len(core.flow.requests) == 1)
        (connection,) = fronts._http.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        await closed(writer)


@pytest.mark.parametrize("setting", ["port", "grpc_port"])
async def test_a_busy_port_is_named_with_its_setting_and_nothing_is_left_open(tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        core = make_core(tmp_path, router={setting: port})
        with pytest.raises(PortInUse, match=rf"router\.{setting}: port {port} "):
            await serve_fronts(core, core.config)
    async with running(core) as fronts, client_of(fronts) as http:
        assert (await http.get("/health")).status_code == 200


async def test_a_host_that_is_not_ours_is_a_config_error(tmp_path: Path) -> None:
    core = make_core(tmp_path, router={"host": "203.0.113.7"})
    with pytest.raises(ConfigError, match=r"router\.port: cannot listen on 203\.0\.113\.7"):
        await serve_fronts(core, core.config)


# --- probes and insight ---


async def test_probes_models_and_insight(core: FakeCore) -> None:
    async with running(core) as fronts, client_of(fronts) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).status_code == 200
        core.not_ready = "no decode worker"
        not_ready = await http.get("/ready")
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "no decode worker")
        assert (await http.get("/health")).status_code == 200
        assert "pdray_up 1.0" in (await http.get("/metrics")).text
        assert (await http.get("/metrics")).headers["content-type"].startswith("text/plain; version=")
        assert (await http.get("/v1/cluster")).json()["models"] == ["tiny"]
        assert (await http.get("/debug/steps")).json() == {"workers": {}}
        assert error_of(await http.get("/debug/steps?worker=x"))["code"] == "not_found"
        assert error_of(await http.get("/debug/requests/none"))["code"] == "not_found"
        models = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny", 256)]
        assert (await http.get("/v1/models/tiny")).json() == models[0]
        assert error_of(await http.get("/v1/models/other"))["code"] == "model_not_found"
        assert not [name for name in (await http.get("/health")).headers if name.startswith("access-control")]


async def test_the_document_of_the_api_names_every_route(core: FakeCore) -> None:
    async with running(core) as fronts, client_of(fronts) as http:
        document = (await http.get("/openapi.json")).json()
    assert {CHAT, TEXT, "/v1/models", "/health", "/ready", "/metrics", "/v1/cluster"} <= set(document["paths"])
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["properties"]
    assert "temperature" in body["properties"]


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_allow_only_their_own_script(core: FakeCore, path: str) -> None:
    async with running(core) as fronts, client_of(fronts) as http:
        page = await http.get(path)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "http:" not in page.text.replace("http://www.w3.org", "")
    assert "https:" not in page.text


async def test_a_served_name_stands_in_for_the_models_own(tmp_path: Path) -> None:
    core = make_core(tmp_path, model={"served_name": "org/my model"})
    async with running(core) as fronts, client_of(fronts) as http:
        assert (await http.get("/v1/models/org/my%20model")).json()["id"] == "org/my model"
        answer = await http.post(CHAT, json={"messages": HI, "model": "org/my model"})
        assert answer.json()["model"] == "org/my model"
        assert (await http.post(CHAT, json={"messages": HI, "model": "tiny"})).status_code == 404
