"""Streams outlive the workers that make them: with two pairs, a kill -9 changes no token of any answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from services.protocol.client import AsyncPdrayClient, CallOptions, Piece
from tests import prompts
from tests.integration.rig import Cluster

PROMPT = [5, 66, 77, 88, *range(300, 330)]
LONG = [7 + i % 490 for i in range(900)]
ASKED = 500
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 200, "maxLength": 300}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": ASKED, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 11, "max_tokens": ASKED, "ignore_eos": True},
    "penalties": {
        "temperature": 1.0,
        "seed": 12,
        "max_tokens": ASKED,
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "logprobs": {"temperature": 1.0, "seed": 13, "max_tokens": ASKED, "ignore_eos": True, "logprobs": 2},
    "schema": {"temperature": 1.0, "seed": 14, "max_tokens": 800, "json": json.dumps(SCHEMA)},
    "choices": {"temperature": 1.0, "seed": 15, "max_tokens": ASKED, "ignore_eos": True, "n": 3},
}


@pytest.fixture(scope="module")
def cluster(invariant_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("migration"),
        invariant_model_folder,
        prefill=2,
        decode=2,
        settings={"transfer.transport": "tcp", "transfer.throttle_bytes_per_s": 1_000_000, "transfer.lease_ms": 2000},
    )
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())


class Answer:
    """One request over gRPC: the ids of each choice as they came."""

    def __init__(self, cluster: Cluster, label: str, fields: dict[str, Any], prompt: list[int]) -> None:
        self.label = label
        self.ids: dict[int, list[int]] = {}
        self.logprobs: list[float] = []
        self.reasons: dict[int, str] = {}
        self.last: Piece | None = None
        self.texts: dict[int, str] = {}
        self.task = asyncio.create_task(self._read(cluster, fields, prompt))

    async def _read(self, cluster: Cluster, fields: dict[str, Any], prompt: list[int]) -> None:
        async with AsyncPdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            options = CallOptions(request_id=self.label)
            async for piece in client.generate(prompt, options=options, **fields):
                self.ids.setdefault(piece.choice, []).extend(piece.token_ids)
                self.logprobs += [told.logprob for told in piece.logprobs]
                self.texts[piece.choice] = self.texts.get(piece.choice, "") + piece.text
                if piece.finish_reason:
                    self.reasons[piece.choice] = piece.finish_reason
                self.last = piece

    async def has(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(map(len, self.ids.values())) < count and not self.task.done():
                await asyncio.sleep(0.002)

    def equals(self, other: Answer) -> None:
        assert (self.ids, self.reasons, self.texts) == (other.ids, other.reasons, other.texts)
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert self.last is not None
        assert other.last is not None
        assert self.last.usage is not None
        assert other.last.usage is not None
        assert self.last.usage.completion_tokens == other.last.usage.completion_tokens
        assert self.last.usage.prompt_tokens == other.last.usage.prompt_tokens


async def ask(cluster: Cluster, label: str, fields: dict[str, Any], prompt: list[int] = PROMPT) -> Answer:
    answer = Answer(cluster, label, fields, prompt)
    await answer.task
    return answer


async def kinds(cluster: Cluster, label: str) -> list[str]:
    return [a["kind"] for a in (await cluster.debug(label))["attempts"]]


@asynccontextmanager
async def killed(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """The worker is gone; a successor serves at its address afterwards."""
    cluster.kill(name)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.processes[name].wait, 10)
        cluster.start_worker(name)
        await cluster.ready()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["decode-0", pytest.param("decode-1", marks=pytest.mark.slow)])
async def test_a_decode_worker_killed_mid_stream_changes_no_token(cluster: Cluster, victim: str) -> None:
    """Each request runs twice at once, so that both decode workers have it."""
    names = [name for name in VARIANTS for _ in range(2)]
    running = [Answer(cluster, f"{name}-{victim}-{i}", VARIANTS[name], PROMPT) for i, name in enumerate(names)]
    await asyncio.gather(*(answer.has(20) for answer in running))
    async with killed(cluster, victim):
        await asyncio.gather(*(answer.task for answer in running))
    moved: set[str] = set()
    for name, answer in zip(names, running, strict=True):
        tried = await kinds(cluster, answer.label)
        assert tried in (["submit"], ["submit", "migrate"]), (answer.label, tried)
        moved |= {name} if "migrate" in tried else set()
    assert len(moved) >= 3, moved
    for name in VARIANTS:
        whole = await ask(cluster, f"{name}-{victim}-whole", VARIANTS[name])
        for answer in running:
            if answer.label.startswith(f"{name}-"):
                answer.equals(whole)
    jsonschema.validate(json.loads(running[names.index("schema")].texts[0]), SCHEMA)
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=5).text
    assert any(line.startswith('pdray_rungs_total{rung="migrate"}') for line in metrics.splitlines())
    cluster.check(await cluster.idle())


@pytest.mark.timeout(120)
async def test_a_prefill_worker_killed_between_token_1_and_the_commit_changes_no_token(cluster: Cluster) -> None:
    """The KV is on its way when the writer dies: the other one computes it again, behind token 1."""
    fields = VARIANTS["seeded"] | {"max_tokens": 60}
    answer = Answer(cluster, "long", fields, LONG)
    await answer.has(1)
    attempts = (await cluster.debug("long"))["attempts"]
    async with killed(cluster, attempts[0]["prefill"]):
        await answer.task
    tried = await kinds(cluster, "long")
    answer.equals(await ask(cluster, "long-after", fields, LONG))
    assert tried == ["submit", "migrate"]
    cluster.check(await cluster.idle())


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_stream_over_http_goes_on_with_text_stop_string_and_usage(cluster: Cluster) -> None:
    """The last one that uses the cluster: it leaves one pair."""
    body = {"prompt": PROMPT, "max_tokens": ASKED, "temperature": 1, "seed": 5, "ignore_eos": True}
    whole = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["text"]
    stop = next(text[i : i + 4] for i in range(len(text) - 30, 0, -1) if text.index(text[i : i + 4]) == i)
    body |= {"stop": [stop], "stream": True, "stream_options": {"include_usage": True}}
    lines: list[str] = []
    headers = {"X-Request-Id": "over-http"}
    async with httpx.AsyncClient(timeout=60) as client:
        stream = client.stream("POST", f"{cluster.url}/v1/completions", json=body, headers=headers)
        async with stream as reply:
            assert reply.status_code == 200
            victim = ""
            async for line in reply.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                if len(lines) == 20:
                    victim = (await cluster.debug("over-http"))["decode"]
                    cluster.kill(victim)
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["text"] for e in events for c in e["choices"]) == text[: text.index(stop)]
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["stop"]
    assert events[-1]["usage"]["prompt_tokens"] == len(PROMPT)
    assert await kinds(cluster, "over-http") == ["submit", "migrate"]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_second_loss_while_the_stream_is_being_computed_again(
    default_model_folder: Path, tmp_path: Path
) -> None:
    """The decode worker dies, then the prefill worker that computes prompt and outputs again."""
    cluster = Cluster(tmp_path, default_model_folder, prefill=2, decode=2, settings={"transfer.transport": "tcp"})
    await cluster.start()
    try:
        prompt = list(prompts.prompt(700))
        fields = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
        answer = Answer(cluster, "twice", fields, prompt)
        await answer.has(5)
        first = (await cluster.debug("twice"))["attempts"][0]
        cluster.kill(first["decode"])
        async with asyncio.timeout(30):
            while len(attempts := (await cluster.debug("twice"))["attempts"]) < 2:
                await asyncio.sleep(0.01)
        cluster.kill(attempts[1]["prefill"])
        await answer.task
        assert tuple(answer.ids[0]) == prompts.greedy(default_model_folder, tuple(prompt), 48)
        assert (await kinds(cluster, "twice"))[:2] == ["submit", "migrate"]
    finally:
        await cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_mixed_worker_takes_over_alone(invariant_model_folder: Path, tmp_path: Path, variant: str) -> None:
    cluster = Cluster(tmp_path, invariant_model_folder, prefill=0, decode=0, mixed=2)
    await cluster.start()
    try:
        whole = await ask(cluster, "whole", VARIANTS[variant])
        answer = Answer(cluster, "moved", VARIANTS[variant], PROMPT)
        await answer.has(20)
        cluster.kill((await cluster.debug("moved"))["prefill"])
        await answer.task
        answer.equals(whole)
        assert await kinds(cluster, "moved") == ["submit", "migrate"]
    finally:
        await cluster.stop()
