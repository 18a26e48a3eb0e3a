"""Recorded traces: Mooncake's form, equal blocks under equal names, nothing of the text, bounded."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from services.bench import trace_record
from services.bench.load.trace import read_trace
from services.bench.trace_record import in_order
from services.config import RouterConfig
from services.router import record
from services.router.record import Namer, Recorder
from tests import fronts
from tests.fake_worker import Cluster
from tests.unit.test_flow import collect, make_core, request, until


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_prefixes_have_equal_names_up_to_where_they_part() -> None:
    namer = Namer(b"k")
    one, other = namer.ids(range(1300), ""), namer.ids([*range(1024), 5, 6], "")
    assert (len(one), len(other)) == (3, 3)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert namer.ids([9, *range(1, 1300)], "")[1] != one[1], "a name stands for all before it too"
    assert namer.ids([], "") == []


def test_names_differ_between_salts_and_between_recordings() -> None:
    ids = list(range(512))
    assert Namer(b"k").ids(ids, "a") != Namer(b"k").ids(ids, "b")
    assert Namer().ids(ids, "") != Namer().ids(ids, "")
    assert all(0 <= x < 2**53 for x in Namer().ids(list(range(5000)), ""))


def test_a_file_is_a_trace_that_the_bench_reads(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "deep" / "trace.jsonl"
    recorder = Recorder(clock)
    assert not recorder.is_active
    recorder.open(path)
    recorder.note(101.5, list(range(600)), "", 7)
    recorder.note(100.25, list(range(512)), "", 3)
    recorder.close()
    first, second = rows(path)
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (1500, 600, 7)
    assert first["hash_ids"][:1] == second["hash_ids"]
    assert [line.input_tokens for line in read_trace(path)] == [600, 512]


def test_a_file_ends_at_its_bound_with_whole_lines(tmp_path: Path) -> None:
    path, recorder = tmp_path / "trace.jsonl", Recorder(Clock())
    recorder.open(path, max_bytes=500)
    for _ in range(200):
        recorder.note(101.0, [1, 2, 3], "", 1)
    recorder.close()
    assert path.stat().st_size <= 500
    assert 3 <= len(rows(path)) <= 10


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"router\.record_trace"):
        Recorder(Clock()).open(tmp_path / "file" / "trace")


async def test_a_slow_listener_loses_lines_and_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_PENDING", 4)
    recorder = Recorder(Clock())
    lines = recorder.listen()
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    recorder.note(99.0, [1], "", 1)  # came before
    for i in range(10):
        recorder.note(101.0 + i, [1], "", 1)
    assert json.loads(await first)["timestamp"] == 1000
    assert recorder.dropped == 6
    recorder.end_listening()
    assert len([line async for line in lines]) == 3
    assert not recorder.is_active


async def test_listeners_are_bounded() -> None:
    recorder = Recorder(Clock())
    streams = [recorder.listen() for _ in range(record.MAX_LISTENERS)]
    waiting = [asyncio.ensure_future(anext(s)) for s in streams]
    assert not recorder.is_crowded
    await asyncio.sleep(0)
    assert recorder.is_crowded
    recorder.end_listening()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not recorder.is_crowded


async def test_a_recording_too_many_is_refused_before_it_begins(tmp_path: Path) -> None:
    core = fronts.make_core(tmp_path)
    async with fronts.running(core) as ports, fronts.client_of(ports) as http:
        waiting = [asyncio.ensure_future(anext(core.recorder.listen())) for _ in range(record.MAX_LISTENERS)]
        await asyncio.sleep(0)
        refused = await http.get("/debug/trace?seconds=1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"]
        core.recorder.end_listening()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await http.get("/debug/trace?seconds=0.05")).status_code == 200


def test_what_was_recorded_is_put_in_order_of_arrival() -> None:
    lines = [b'{"timestamp": 900, "n": 2}\n', b'{"timestamp": 700, "n": 1}\n']
    assert [json.loads(x) for x in in_order(lines)] == [{"timestamp": 0, "n": 1}, {"timestamp": 200, "n": 2}]
    assert in_order([]) == []


async def test_a_router_records_what_it_served_and_not_what_was_wrong(tmp_path: Path) -> None:
    cluster, path = Cluster(), tmp_path / "trace.jsonl"
    await cluster.add("m0", "mixed")
    core = make_core(cluster, router=RouterConfig(record_trace=str(path)))
    await core.start()
    try:
        await until(lambda: core.ready()[0])
        await collect(core, request(4))
        with pytest.raises(Exception, match="max_tokens"):
            await collect(core, request(0))
        await collect(core, request(2, tuple(range(700))))
    finally:
        await core.stop()
        await cluster.stop()
    assert [(r["input_length"], r["output_length"], len(r["hash_ids"])) for r in rows(path)] == [
        (40, 4, 1),
        (700, 2, 2),
    ]
    assert all(set(r) == {"timestamp", "input_length", "output_length", "hash_ids"} for r in rows(path))


async def test_the_command_writes_what_a_router_is_asked_in_order(tmp_path: Path) -> None:
    core, out = fronts.make_core(tmp_path), tmp_path / "trace.jsonl"
    async with fronts.running(core) as served:
        url = f"http://127.0.0.1:{served.http_port}/v1"
        working = asyncio.create_task(asyncio.to_thread(trace_record.record, url, out, 1.0))
        await until(lambda: core.recorder.is_active)
        now_s = time.monotonic()
        core.recorder.note(now_s + 0.2, list(range(30)), "", 2)
        core.recorder.note(now_s + 0.1, list(range(20)), "", 1)
        assert await working == 2
        with pytest.raises(ConfigError, match="404"):
            await asyncio.to_thread(trace_record.record, url + "/nowhere", out, 1.0)
    assert [(r["timestamp"], r["input_length"]) for r in rows(out)] == [(0, 20), (100, 30)]


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    for url in ("ftp://x", "http://127.0.0.1:9"):
        with pytest.raises(ConfigError, match="--url"):
            trace_record.record(url, tmp_path / "t", 1.0)
