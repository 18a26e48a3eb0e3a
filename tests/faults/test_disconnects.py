"""Clients leave at any moment, over HTTP and gRPC: no block is lost, and nobody gets another's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.protocol.client import AsyncPdrayClient
from tests.faults.control import Rule
from tests.faults.rig import Disturbed

pytestmark = pytest.mark.slow

TOKENS = 20
SLOW = [pytest.mark.slow, pytest.mark.timeout(2400)]
PHASES = ("queued", "prefill_started", "receiving", "committed")
"""Events of a request's timeline; where it is when its client leaves lies between two of them."""


@dataclass(frozen=True)
class Known:
    """A prompt and its undisturbed answer."""

    prompt: list[int]
    ids: list[int]
    text: str

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


async def known(disturbed: Disturbed, count: int) -> list[Known]:
    found = []
    for _ in range(count):
        prompt = disturbed.prompt(600 - disturbed.rng.randrange(300))
        reply = await asyncio.to_thread(disturbed.cluster.complete, prompt, max_tokens=TOKENS)
        assert reply.status_code == 200, reply.text
        found.append(Known(prompt, disturbed.expected(prompt, TOKENS), reply.json()["choices"][0]["text"]))
    return found


async def leave_http(client: httpx.AsyncClient, url: str, one: Known, after_s: float) -> None:
    text = ""
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(after_s),
            client.stream("POST", f"{url}/v1/completions", json=one.body()) as reply,
        ):
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
    assert one.text.startswith(text), (one, text)


async def leave_grpc(client: AsyncPdrayClient, one: Known, after_s: float) -> None:
    ids: list[int] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            async for piece in client.generate(one.prompt, temperature=0.0, ignore_eos=True, max_tokens=TOKENS):
                ids += piece.token_ids
    assert ids == one.ids[: len(ids)], (one, ids)


@pytest.mark.parametrize(("count", "at_once"), [(30, 6), pytest.param(1000, 8, marks=SLOW)])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    disturbed: Disturbed, count: int, at_once: int
) -> None:
    rng = random.Random(count)
    some = await known(disturbed, 8 if count < 100 else 24)
    revoked = moves(disturbed, "revoked")
    disturbed.faults.set(Rule(fault="throttle", bytes_per_s=800_000))  # some 100 ms for a layer
    async with httpx.AsyncClient(timeout=60) as http, disturbed.client() as grpc:
        for first in range(0, count, at_once):
            leaving = []
            for number in range(first, min(first + at_once, count)):
                one, after_s = rng.choice(some), rng.uniform(0, 0.8)
                if number % 2:
                    leaving.append(leave_grpc(grpc, one, after_s))
                else:
                    leaving.append(leave_http(http, disturbed.cluster.url, one, after_s))
            await asyncio.gather(*leaving)
    await disturbed.assert_right_afterwards()
    assert moves(disturbed, "revoked") > revoked


def moves(disturbed: Disturbed, arrow: str) -> float:
    """Tickets of all workers that went along this arrow."""
    text = httpx.get(f"{disturbed.cluster.url}/metrics", timeout=5).text
    lines = [line for line in text.splitlines() if line.startswith(f'pdray_handoff_moves_total{{arrow="{arrow}"')]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("phase", PHASES)
async def test_who_leaves_in_a_phase_frees_its_blocks_on_both_workers(disturbed: Disturbed, phase: str) -> None:
    """The client leaves once the request's timeline shows the phase; slow layers and a blocker keep it there."""
    disturbed.faults.set(Rule(fault="delay", seconds=0.0 if phase == "committed" else 0.5))
    async with disturbed.client() as client, httpx.AsyncClient(timeout=60) as http:
        blocker = asyncio.create_task(drain(client, disturbed.prompt(500))) if phase == "queued" else None
        body = {"prompt": disturbed.prompt(300), "max_tokens": 200, "ignore_eos": True, "stream": True}
        request_id = f"phase-{phase}"
        task = asyncio.create_task(
            post(http, f"{disturbed.cluster.url}/v1/completions", body, {"X-Request-Id": request_id})
        )
        await until_event(http, disturbed.cluster.url, request_id, phase)
        task.cancel()
        if blocker is not None:
            blocker.cancel()
        await asyncio.wait([task, *([blocker] if blocker else [])])
    await disturbed.assert_right_afterwards()


async def post(http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with http.stream("POST", url, json=body, headers=headers) as reply:
        async for _ in reply.aiter_lines():
            pass


async def drain(client: AsyncPdrayClient, prompt: list[int]) -> None:
    async for _ in client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=60):
        pass


async def until_event(http: httpx.AsyncClient, url: str, request_id: str, name: str) -> None:
    async with asyncio.timeout(30):
        while True:
            reply = await http.get(f"{url}/debug/requests/{request_id}")
            if reply.status_code == 200 and f'"{name}"' in reply.text:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=SLOW)])
async def test_a_grpc_call_that_is_cancelled_after_three_tokens_frees_both_workers(
    disturbed: Disturbed, count: int
) -> None:
    disturbed.faults.set()
    async with disturbed.client() as client:
        for number in range(count):
            prompt = disturbed.prompt(40)
            pieces = client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=400)
            ids = list(itertools.chain.from_iterable([piece.token_ids async for piece in take(pieces, 3)]))
            await pieces.aclose()
            assert ids == disturbed.expected(prompt, 8)[: len(ids)], number
            await disturbed.cluster.idle(1.0 if count == 100 else 10.0)  # a second is what is promised
    await disturbed.assert_right_afterwards()


async def take(pieces: Any, count: int) -> Any:
    async for piece in pieces:
        yield piece
        count -= len(piece.token_ids)
        if count <= 0:
            return
