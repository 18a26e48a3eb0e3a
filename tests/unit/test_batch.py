"""`pdray batch` against a running front: answers, failures, going on, bad files, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.batch.command import BAD_INPUT, OK, SOME_FAILED, batch_main
from services.batch.lines import BadInput, check_lines
from services.batch.run import Batch, plan, run
from services.cli import app
from services.protocol.errors import ErrorCode, RequestError
from services.router.types import TokenEvent
from tests.fronts import failing, ids_of, make_core, running, saying


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": given}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({x["custom_id"] for x in found}) == len(found)
    return {x["custom_id"]: x for x in found}


def batch_of(tmp_path: Path, port: int, **more: Any) -> Batch:
    url = f"http://127.0.0.1:{port}"
    return Batch(source=tmp_path / "in.jsonl", target=tmp_path / "out.jsonl", base_url=url, retries=0, **more)


async def test_every_line_gets_an_answer_and_failures_are_told(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    text = {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    write(tmp_path / "in.jsonl", chat("a"), "\n", text, chat("bad", temperature=9), chat("other", model="other"))
    async with running(core) as fronts:
        told: list[str] = []
        failed = await run(plan(batch_of(tmp_path, fronts.http_port)), lambda x: told.append(x.custom_id))
    found = answers(tmp_path / "out.jsonl")
    assert failed == 2
    assert sorted(told) == sorted(found) == ["a", "bad", "other", "t"]
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert found["t"]["response"]["body"]["object"] == "text_completion"
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["other"]["response"]["status_code"] == 404
    assert all(x["error"] is None for x in found.values())


async def test_a_second_run_asks_only_for_what_has_no_good_answer(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.flow.script = failing(RequestError(ErrorCode.NO_WORKERS, "nobody"))
    write(tmp_path / "in.jsonl", *(chat(str(i)) for i in range(5)))
    async with running(core) as fronts:
        batch = batch_of(tmp_path, fronts.http_port)
        assert await run(plan(batch), lambda _: None) == 5
        assert {x["response"]["status_code"] for x in answers(batch.target).values()} == {503}
        good = [json.dumps({"custom_id": "3", "response": {"status_code": 200}}) + "\n", '{"custom_id": "4", "resp']
        write(batch.target, *batch.target.read_text().splitlines(keepends=True), *good)
        core.forget()
        planned = plan(batch)
        assert (planned.finished, planned.left) == ({"3"}, 4)
        assert await run(planned, lambda _: None) == 0
        assert len(core.flow.requests) == 4
        assert plan(batch).left == 0
    assert sorted(answers(batch.target)) == ["0", "1", "2", "3", "4"]


async def test_no_more_than_the_bound_run_at_once(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    now = most = 0

    async def script(_request: Any) -> AsyncIterator[TokenEvent]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(20):
            await asyncio.sleep(0)
        now -= 1
        yield TokenEvent(token_ids=ids_of("x"), finish_reason="length")

    core.flow.script = script
    write(tmp_path / "in.jsonl", *(chat(str(i)) for i in range(20)))
    async with running(core) as fronts:
        assert await run(plan(batch_of(tmp_path, fronts.http_port, concurrency=3)), lambda _: None) == 0
    assert most == 3


async def test_a_server_that_is_not_there_fails_every_line(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", chat("a"))
    assert await run(plan(batch_of(tmp_path, 1)), lambda _: None) == 1
    found = answers(tmp_path / "out.jsonl")["a"]
    assert (found["response"], found["error"]["code"]) == (None, "no_answer")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{\n", "not valid JSON"),
        ("[]\n", "not an object"),
        ({"url": "/v1/completions", "body": {}}, "custom_id"),
        ({**chat("a"), "method": "GET"}, "method"),
        ({**chat("a"), "url": "/v1/files"}, "url"),
        ({**chat("a"), "body": []}, "body"),
        (chat("a", stream=True), "stream"),
        (chat("first"), "is that of line 1"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(tmp_path: Path, line: Any, words: str) -> None:
    path = write(tmp_path / "in.jsonl", chat("first"), line)
    with pytest.raises(BadInput, match=f"line 2: .*{words}"):
        check_lines(path)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *["[]\n"] * 25)
    with pytest.raises(BadInput, match="and 15 more"):
        check_lines(path)


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_the_command_tells_what_it_did(tmp_path: Path, is_terminal: bool) -> None:
    core = make_core(tmp_path)
    core.flow.script = saying("fine")
    write(tmp_path / "in.jsonl", chat("a"), chat("b", temperature=9))
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=200)
    async with running(core) as fronts:
        batch = batch_of(tmp_path, fronts.http_port)
        assert await asyncio.to_thread(batch_main, batch, console) == SOME_FAILED
        write(tmp_path / "in.jsonl", chat("a"))
        assert await asyncio.to_thread(batch_main, batch, console) == OK
    assert "1 of 2 lines have an answer" in out.getvalue()
    assert "1 of 1 lines are answered" in out.getvalue()


def test_the_command_line_refuses_a_bad_file_with_its_own_code(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", "[]\n")
    result = CliRunner().invoke(app, ["batch", str(path), "-o", str(tmp_path / "out.jsonl")])
    assert result.exit_code == BAD_INPUT
    assert "line 1: not an object" in result.output
    assert not (tmp_path / "out.jsonl").exists()
