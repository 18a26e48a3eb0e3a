"""The router's core with real gRPC and a real Valkey: discovery, hints, refusals, and what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.blocks import block_names
from kvstore.index.base import WorkerRecord
from kvstore.index.embedded import EmbeddedValkey
from kvstore.index.redis import RedisIndex
from services.config import RedisConfig, ServeConfig, WorkerConfig
from services.protocol.auth import sign_registration
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import ModelCard
from services.protocol.proto import worker_pb2
from services.router import links
from services.router.core import RouterCore
from services.router.types import RouterRequest, SamplingSpec, TokenEvent, new_request_id
from tests.fake_worker import CARD, SECRET, Cluster, FakeWorker, accept_only, fingerprint, token


async def until(condition: Callable[[], Any], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        await asyncio.sleep(0.01)


def request(prompt: list[int], max_tokens: int = 3) -> RouterRequest:
    return RouterRequest(
        request_id=new_request_id(),
        prompt_ids=tuple(prompt),
        sampling=SamplingSpec(max_tokens=max_tokens, temperature=0.0),
        received_s=time.monotonic(),
    )


async def collect(core: RouterCore, asked: RouterRequest) -> list[TokenEvent]:
    return [event async for event in core.flow.stream(asked)]


def served_by(core: RouterCore, asked: RouterRequest) -> tuple[str, str]:
    shown = core.request_debug(asked.request_id)
    assert shown is not None
    return shown["prefill"], shown["decode"]


def states(core: RouterCore) -> dict[str, str]:
    return {w["worker_id"]: w["state"] for w in core.cluster()["workers"]}


async def warm(core: RouterCore, names: list[bytes], depth: int) -> None:
    """Some worker is known to hold so many blocks of the prompt."""
    await until(lambda: any(w.cached_blocks == depth for w in core.view.candidates(names)))


def config(**changed: Any) -> ServeConfig:
    return dataclasses.replace(ServeConfig(secret=SECRET, worker=WorkerConfig(stall_s=4.0)), **changed)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def running(core: RouterCore, alone: bool = True) -> AsyncIterator[RouterCore]:
    """Started, then stopped; where no other router runs beside it, with no task left behind."""
    before = asyncio.all_tasks()
    await core.start()
    try:
        yield core
    finally:
        await core.stop()
        await asyncio.sleep(0)
        ours = ("link-", "acks-", "abort", "discovery-", "index-feed", "fleet-", "close-")
        left = [t.get_name() for t in asyncio.all_tasks() - before if t.get_name().startswith(ours)]
        assert left == [] or not alone


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EmbeddedValkey()
        self.indexes: list[RedisIndex] = []

    async def start(self) -> None:
        await self.server.start(self.folder)

    def index(self) -> RedisIndex:
        made = RedisIndex(self.server.url, "test", 15.0, timeout_s=1.0)
        self.indexes.append(made)
        return made

    async def announce(self, worker: FakeWorker, payload: bytes | None = None) -> None:
        body = worker.registration.SerializeToString() if payload is None else payload
        await self.index().announce(WorkerRecord(worker.worker_id, worker.epoch, body), b"")

    async def stop(self) -> None:
        for index in self.indexes:
            await index.close()
        await self.server.stop()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_workers_are_found_in_redis_and_unsigned_ones_are_not(cluster: Cluster, store: Store) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    forged = await cluster.add("p9", "prefill", secret="another")
    for worker in (p, d, forged):
        await store.announce(worker)
    await store.index().announce(WorkerRecord("junk", "e", b"\xff\xff not protobuf"), b"")
    redis = RedisConfig(url=store.server.url, is_embedded=True)
    async with running(RouterCore(config(redis=redis), CARD, index=store.index())) as core:
        await until(lambda: core.ready()[0])
        await until(lambda: core.redis_mode == "embedded")
        assert states(core) == {"p0": "ready", "d0": "ready"}
        assert forged.hellos == []
        ignored = core.metrics.registry.get_sample_value("pdray_index_ignored_total")
        assert ignored == 2
        assert [t for e in await collect(core, request([1] * 40)) for t in e.token_ids] == [token(i) for i in range(3)]


async def test_a_warm_worker_in_redis_draws_its_prompts_and_a_router_restart_keeps_that(
    cluster: Cluster, store: Store
) -> None:
    for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        worker = await cluster.add(worker_id, role)
        await store.announce(worker)
    prompt = list(range(1, 200))
    index = store.index()
    for _ in range(2):
        async with running(RouterCore(config(), CARD, index=store.index())) as core:
            await until(lambda: sum(s == "ready" for s in states(core).values()) == 3)
            kind = core.view.kind()
            assert kind is not None
            names = block_names(prompt, 16, kind.root(""))
            await index.publish("p1", "e1", names, [])  # told again in the second round: a no-op
            await warm(core, names, 12)
            asked = request(prompt)
            await collect(core, asked)
            assert served_by(core, asked) == ("p1", "d0")


async def test_redis_may_die_and_come_back_empty_without_anything_failing(cluster: Cluster, store: Store) -> None:
    for worker_id, role in (("p0", "prefill"), ("d0", "decode")):
        await store.announce(await cluster.add(worker_id, role))
    async with running(RouterCore(config(), CARD, index=store.index())) as core:
        await until(lambda: core.ready()[0] and core.redis_mode == "external")
        await store.server.stop()
        await until(lambda: core.redis_mode == "down")
        assert core.metrics.registry.get_sample_value("pdray_redis_up") == 0
        assert states(core) == {"p0": "ready", "d0": "ready"}
        assert len(await collect(core, request([1] * 40))) >= 1
        await store.server.start(store.folder)
        await until(lambda: core.redis_mode == "external")
        assert states(core) == {"p0": "ready", "d0": "ready"}
        kind = core.view.kind()
        assert kind is not None
        names = block_names([7] * 64, 16, kind.root(""))
        await store.index().publish("p0", "e1", names, [])
        await warm(core, names, 4)


async def test_a_router_started_while_redis_is_down_serves_by_its_other_sources(cluster: Cluster, store: Store) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    await store.server.stop()

    async def ray() -> list[str]:
        return [d.address]

    async def broken() -> list[str]:
        raise RuntimeError("no such thing")

    core = RouterCore(config(workers=(p.address,)), CARD, index=store.index(), sources=[ray, broken])
    async with running(core):
        await until(lambda: core.ready()[0])
        assert core.redis_mode == "down"
        assert len(await collect(core, request([1] * 40))) >= 1


async def test_one_worker_listed_under_two_addresses_is_attached_once(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    alias = p.address.replace("127.0.0.1", "localhost")
    async with running(RouterCore(config(workers=(p.address, alias, d.address)), CARD)) as core:
        await until(lambda: core.ready()[0] and "p0" in states(core))
        await until(lambda: "the same process as p0" in json.dumps(core.cluster()))
        assert len(await collect(core, request([1] * 40))) >= 1
        assert len(p.hellos) == 1


async def test_two_living_processes_with_one_worker_id_do_not_fight(cluster: Cluster) -> None:
    d = await cluster.add("d0", "decode")
    first, other = await cluster.add("p0", "prefill"), Cluster()
    second = await other.add("p0", "prefill", epoch="e2")
    async with running(RouterCore(config(workers=(first.address, d.address)), CARD)) as core:
        await until(lambda: core.ready()[0])
        core._fleet.set_addresses([first.address, d.address, second.address])
        await until(lambda: "in use by another process" in json.dumps(core.cluster()))
        assert (len(first.hellos), len(second.hellos)) == (1, 0)
        await first.kill()
        await until(lambda: len(second.hellos) == 1)
        await until(lambda: core.ready()[0])
        assert core.view.entry("p0").epoch == "e2"
    await other.stop()


async def test_a_worker_that_moves_to_another_port_is_one_worker(cluster: Cluster) -> None:
    d, p = await cluster.add("d0", "decode"), await cluster.add("p0", "prefill")
    addresses = [p.address, d.address]

    async def source() -> list[str]:
        return addresses

    async with running(RouterCore(config(), CARD, sources=[source])) as core:
        await until(lambda: core.ready()[0])
        old = p.address
        await p.kill()
        p.port = 0
        await p.restart("e2")
        addresses[0] = p.address
        await until(lambda: core.ready()[0] and core.view.entry("p0").epoch == "e2")
        assert len(await collect(core, request([1] * 40))) >= 1
        assert old in states(core)  # still listed as unreached until it is forgotten
        assert states(core)["p0"] == "ready"


async def test_incompatible_workers_are_refused_with_both_values_and_no_request_reaches_them(
    cluster: Cluster,
) -> None:
    p = await cluster.add("p0", "prefill")
    async with running(RouterCore(config(workers=(p.address,)), CARD)) as core:
        await until(lambda: "p0" in states(core))
        d = await cluster.add("d0", "decode", fingerprint_=fingerprint(block_size=32))
        core._fleet.set_addresses([p.address, d.address])
        await until(lambda: states(core).get("d0") == "refused")
        ready, reason = core.ready()
        assert not ready
        assert all(text in reason for text in ("16", "32", "block_size"))
        with pytest.raises(RequestError) as caught:
            await collect(core, request([1] * 40))
        assert caught.value.code is ErrorCode.INCOMPATIBLE_WORKERS
        assert caught.value.status.http == 503
        assert all(text in caught.value.message for text in ("16", "32"))
        assert p.submits == []
        (row,) = [w for w in core.cluster()["workers"] if w["worker_id"] == "d0"]
        assert "32" in row["reason"]


async def test_a_worker_with_another_secret_is_never_attached(cluster: Cluster) -> None:
    p = await cluster.add("p0", "prefill", secret="another")
    async with running(RouterCore(config(workers=(p.address,)), CARD)) as core:
        await until(lambda: "secret" in json.dumps(core.cluster()))
        assert p.hellos == []


async def test_a_draining_worker_ends_what_it_has_and_gets_nothing_new(cluster: Cluster) -> None:
    for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        await cluster.add(worker_id, role)
    async with running(RouterCore(config(workers=tuple(cluster.addresses)), CARD)) as core:
        await until(lambda: sum(s == "ready" for s in states(core).values()) == 3)
        p0 = cluster.workers["p0"]
        p0.on_submit = accept_only
        events = asyncio.ensure_future(collect(core, request([1] * 40, max_tokens=1)))
        await until(lambda: p0.submits)
        p0.registration.draining = True
        sign_registration(p0.registration, SECRET)
        await p0.say(worker_pb2.WorkerMessage(registration=p0.registration))
        await until(lambda: states(core)["p0"] == "draining")
        for _ in range(3):
            asked = request([2] * 40)
            await collect(core, asked)
            assert served_by(core, asked)[0] == "p1"
        await p0.output(p0.submits[0].request, 0, token(0), finish="length")
        assert (await events)[-1].finish_reason == "length"


async def test_a_burst_of_cold_requests_spreads_over_workers_through_two_routers(cluster: Cluster) -> None:
    for i in range(4):
        worker = await cluster.add(f"p{i}", "prefill")
        worker.on_submit = accept_only
    await cluster.add("d0", "decode")
    addresses = tuple(cluster.addresses)
    async with (
        running(RouterCore(config(workers=addresses), CARD)) as one,
        running(RouterCore(config(workers=addresses), CARD), alone=False) as two,
    ):
        await until(lambda: all(list(states(c).values()).count("ready") == 5 for c in (one, two)))
        prompts = [[1000 + i] * 300 for i in range(64)]
        tasks = [asyncio.ensure_future(collect(one if i % 2 else two, request(p, 1))) for i, p in enumerate(prompts)]
        await until(lambda: sum(len(w.submits) for w in cluster.workers.values()) == 64)
        counts = [len(cluster.workers[f"p{i}"].submits) for i in range(4)]
        assert min(counts) >= 8
        assert max(counts) <= 24
        for worker in cluster.workers.values():
            for submit in worker.submits:
                await worker.output(submit.request, 0, token(0), finish="length")
        await asyncio.gather(*tasks)


async def test_the_cluster_page_has_every_field_and_a_line_for_each_address(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    p.load.running, p.load.blocks_used, p.load.prompt_tokens_computed = 1, 7, 99
    async with running(RouterCore(config(workers=(p.address, d.address, "127.0.0.1:1")), CARD)) as core:
        await until(lambda: core.ready()[0])
        await until(lambda: core.cluster()["workers"][1]["running"] == 1)
        shown = core.cluster()
        json.dumps(shown)
        assert shown["redis"] == {"mode": "down"}
        assert shown["models"] == ["fake"]
        assert [w["worker_id"] for w in shown["workers"]] == ["d0", "p0", "127.0.0.1:1"]
        row = shown["workers"][1]
        fields = {
            "worker_id",
            "role",
            "epoch",
            "pid",
            "node",
            "state",
            "running",
            "waiting",
            "blocks",
            "reason",
            "address",
        }
        fields |= {"prompt_tokens_computed", "prompt_tokens_cached", "tokens_generated", "tokens_forwarded"}
        fields |= {"decode_tokens_forwarded", "tokens_recomputed"}
        assert all(fields <= set(w) for w in shown["workers"])
        assert row["blocks"] == {
            "total": 512, "free": 512, "used": 7, "cached": 0, "reserved": 0, "quarantined": 0,
        }  # fmt: skip
        assert (row["pid"], row["prompt_tokens_computed"]) == (4711, 99)
        assert shown["workers"][2]["state"] == "connecting"
        assert shown["workers"][2]["reason"]


async def test_steps_come_from_the_workers_and_an_unknown_one_is_not_found(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    async with running(RouterCore(config(workers=(p.address, d.address)), CARD)) as core:
        await until(lambda: core.ready()[0])
        everyone = await core.steps()
        assert [w["worker_id"] for w in everyone["workers"]] == ["d0", "p0"]
        one = await core.steps("p0")
        assert one["workers"][0]["steps"] == [{"step": 1, "decodes": 2}]
        with pytest.raises(RequestError) as caught:
            await core.steps("nobody")
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_metrics_show_requests_and_workers_and_a_lost_worker_has_no_series(cluster: Cluster) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    p.load.tokens_generated, p.load.blocks_cached = 5, 3
    async with running(RouterCore(config(workers=(p.address, d.address)), CARD)) as core:
        await until(lambda: core.ready()[0])
        await until(
            lambda: b'pdray_worker_tokens_generated_total{role="prefill",worker="p0"} 5.0' in core.metrics_text()
        )
        for _ in range(3):
            await collect(core, request([1] * 40, max_tokens=4))
        text = core.metrics_text().decode()
        for line in (
            'pdray_requests_total{outcome="ok"} 3.0',
            "pdray_ttft_seconds_count 3.0",
            "pdray_e2e_seconds_count 3.0",
            "pdray_tpot_seconds_count 3.0",
            "pdray_output_tokens_total 12.0",
            "pdray_requests_in_flight 0.0",
            'pdray_worker_kv_blocks{role="prefill",state="cached",worker="p0"} 3.0',
        ):
            assert line in text
        await p.kill()
        await until(lambda: states(core)["p0"] == "lost")
        assert 'worker="p0"' not in core.metrics_text().decode()
        assert 'worker="d0"' in core.metrics_text().decode()


async def test_a_forgotten_address_is_dropped_when_nothing_answers_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.fleet.FORGET_S", 0.1)
    monkeypatch.setattr(links, "GRACE_S", 0.1)
    p = await cluster.add("p0", "prefill")
    listed = [p.address]

    async def source() -> list[str]:
        return listed

    async with running(RouterCore(config(), CARD, sources=[source])) as core:
        await until(lambda: "p0" in states(core))
        listed.clear()
        await asyncio.sleep(0)
        await until(lambda: not core._fleet._listed)
        assert states(core) == {"p0": "ready"}  # unlisted, but alive
        await p.kill()
        await until(lambda: states(core) == {})


async def test_draining_refuses_what_is_new_and_waits_for_what_runs(cluster: Cluster) -> None:
    m = await cluster.add("m0", "mixed")
    m.on_submit = accept_only
    async with running(RouterCore(config(workers=(m.address,)), CARD)) as core:
        await until(lambda: core.ready()[0])
        events = asyncio.ensure_future(collect(core, request([1] * 20, 1)))
        await until(lambda: m.submits)
        drained = asyncio.ensure_future(core.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="stopping"):
            await collect(core, request([1] * 20))
        assert not drained.done()
        await m.output(m.submits[0].request, 0, token(0), finish="length")
        assert await drained
        assert (await events)[-1].finish_reason == "length"


def test_a_core_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        RouterCore(ServeConfig(), CARD)


MAIN = """
import sys
import services.router.main, services.router.core
heavy = [m for m in ("torch", "transformers", "ray") if m in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_the_router_process_imports_neither_torch_nor_transformers_nor_ray() -> None:
    done = subprocess.run([sys.executable, "-c", MAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_program_says_what_is_wrong_with_its_model_and_ends(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("secret: x\nrouter: {port: 0, grpc_port: 0}\n")
    command = [sys.executable, "-m", "services.router", "--model", str(tmp_path), "--config", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "pdray.json" in done.stderr


async def test_the_program_serves_until_sigterm_and_leaves_with_0(
    cluster: Cluster, tiny_model_folder: Path, tmp_path: Path
) -> None:
    card = ModelCard.load(tiny_model_folder)
    kind = fingerprint(model=card.model_fingerprint, tokenizer=card.tokenizer_fingerprint)
    m = await cluster.add("m0", "mixed", fingerprint_=kind)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"secret: {SECRET}\nworkers: ['{m.address}']\nrouter: {{port: 0, grpc_port: 0}}\nredis: {{url: none}}\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", "--model", str(tiny_model_folder), "--config", str(file),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ports = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        await until(lambda: m.hellos, 30)
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["http_port"])
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        os.kill(process.pid, signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
