"""How KV that never arrives whole is dealt with, rung by rung, and under each policy."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.protocol.client import CallOptions
from services.protocol.errors import RequestError
from tests.faults.control import Rule
from tests.faults.rig import Disturbed

pytestmark = pytest.mark.slow

NEVER_WHOLE = Rule(fault="drop", layers=(2,))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6}


async def ask(disturbed: Disturbed, label: str, prompt: list[int]) -> tuple[list[int], str]:
    """Tokens, and the code of the error that ended them."""
    ids: list[int] = []
    async with disturbed.client() as client:
        try:
            async for piece in client.generate(prompt, options=CallOptions(request_id=label), **GREEDY):
                ids += piece.token_ids
        except RequestError as exc:
            return ids, str(exc.code)
    return ids, ""


async def rungs(disturbed: Disturbed, label: str) -> list[str]:
    events = (await disturbed.cluster.debug(label))["events"]
    return [e["detail"]["rung"] for e in events if e["name"] == "rung"]


def counters(disturbed: Disturbed) -> Counter[str]:
    text = httpx.get(f"{disturbed.cluster.url}/metrics", timeout=5).text
    found = re.findall(r'^pdray_rungs_total\{rung="(\w+)"\} (\S+)$', text, re.M)
    return Counter({rung: int(float(value)) for rung, value in found})


async def test_a_decode_worker_computes_alone_what_never_arrives(disturbed: Disturbed) -> None:
    before, prompt = counters(disturbed), disturbed.prompt(90)
    disturbed.faults.set(NEVER_WHOLE)
    computed = (await disturbed.cluster.worker("decode-0"))["prompt_tokens_computed"]
    ids, error = await ask(disturbed, "never-whole", prompt)
    assert (ids, error) == (disturbed.expected(prompt, 6), "")
    assert await rungs(disturbed, "never-whole") == ["retarget", "migrate", "compute_here"]
    assert (counters(disturbed) - before) == Counter(resend=3, retarget=1, migrate=1, compute_here=1)
    await disturbed.assert_right_afterwards()
    async with asyncio.timeout(10):
        while (await disturbed.cluster.worker("decode-0"))["prompt_tokens_computed"] != computed + 90:
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ladder", "recompute", "fail"])
async def test_the_policy_decides_what_follows_a_failed_transfer(tmp_path: Path, policy: str) -> None:
    """Two requests for one prompt at once, under a transport that loses a layer of every ticket."""
    disturbed = Disturbed.build(tmp_path, settings={"transfer.on_kv_failure": policy, "engine.prefix_cache": "hash"})
    await disturbed.cluster.start()
    try:
        prompt = disturbed.prompt(90)
        disturbed.faults.set(NEVER_WHOLE)
        answers = await asyncio.gather(*(ask(disturbed, f"{policy}-{i}", prompt) for i in range(2)))
        expected = disturbed.expected(prompt, 6)
        climbed = [await rungs(disturbed, f"{policy}-{i}") for i in range(2)]
        if policy == "fail":
            assert [error for _, error in answers] == ["transfer_failed"] * 2
            assert all(ids == expected[: len(ids)] for ids, _ in answers)
            assert climbed == [["fail"]] * 2
            assert counters(disturbed) == Counter(fail=2)
        else:
            assert answers == [(expected, "")] * 2
            first = "retarget" if policy == "ladder" else "migrate"
            assert [c[0] for c in climbed] == [first] * 2
            assert [c[-1] for c in climbed] == ["compute_here"] * 2
            assert ("resend" in counters(disturbed)) is (policy == "ladder")
        await disturbed.assert_right_afterwards()
    finally:
        await disturbed.cluster.stop()
