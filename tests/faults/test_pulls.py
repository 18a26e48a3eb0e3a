"""KV that is sent back and does not arrive whole: repaired once, else computed, and never text of another prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.control import Rule
from tests.faults.rig import Disturbed

pytestmark = pytest.mark.slow

FIRST, NEXT, ANSWER = 100, 20, 250


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    """A pair that remembers, with steps so small that loading an answer is faster than computing it."""
    settings = {"engine.prefix_cache": "hash", "engine.num_blocks": 200, "engine.max_num_batched_tokens": 16}
    disturbed = Disturbed.build(tmp_path_factory.mktemp("talkative"), settings=settings)
    disturbed.cluster.check_decode_computes_nothing = True
    asyncio.run(disturbed.cluster.start())
    yield disturbed
    disturbed.faults.set()
    asyncio.run(disturbed.cluster.stop())


async def turn(disturbed: Disturbed, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """One request with the right answer; what the prefill worker says afterwards."""
    async with disturbed.client() as client:
        assert await disturbed.ask(client, prompt, max_tokens) == "", disturbed.last_error
    disturbed.cluster.check(await disturbed.cluster.idle())
    return await disturbed.cluster.worker("prefill-0")


@pytest.mark.parametrize(
    ("rule", "fails"),
    [
        pytest.param(None, False, id="undisturbed"),
        pytest.param(Rule(fault="corrupt", layers=(1,), times=1), False, id="corrupt-once"),
        pytest.param(Rule(fault="drop", layers=(2,), times=1), False, id="drop-once"),
        pytest.param(Rule(fault="corrupt", layers=(1,), times=2), True, id="corrupt-twice"),
    ],
)
async def test_a_second_turn_is_right_whatever_happens_to_what_is_sent_back(
    talkative: Disturbed, rule: Rule | None, fails: bool
) -> None:
    prompt = talkative.prompt(FIRST)
    before = await turn(talkative, prompt, ANSWER)
    prompt += talkative.expected(prompt, ANSWER) + talkative.prompt(NEXT)
    talkative.faults.set(*([rule] if rule else []))
    after = await turn(talkative, prompt, 4)
    talkative.faults.set()
    assert after["pulls"] - before["pulls"] == 1
    assert after["pulls_failed"] - before["pulls_failed"] == fails
    computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    in_blocks = (FIRST + ANSWER - 1) // 16 * 16  # of prompt and answer, on the decode worker
    assert computed == len(prompt) - (FIRST // 16 * 16 if fails else in_blocks)
    assert talkative.failures()["extent"] >= (rule is not None)
