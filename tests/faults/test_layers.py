"""Whatever the wire does to layers, an answer is the undisturbed one or a clean error, and the workers count it."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.faults.control import Rule
from tests.faults.rig import NUM_LAYERS, Disturbed

CLEAN = {"transfer_failed", "deadline_exceeded"}
ROUNDS = [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
FLIPS = [20, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.mark.slow
async def run(disturbed: Disturbed, rounds: int, *rules: Rule, tokens: int = 90, at_once: int = 4) -> list[str]:
    """So many requests under these rules; the outcome of each, "" where the answer was the expected one."""
    disturbed.faults.set(*rules)
    outcomes: list[str] = []
    async with disturbed.client() as client:
        for first in range(0, rounds, at_once):
            batch = [disturbed.prompt(tokens) for _ in range(min(at_once, rounds - first))]
            outcomes += await asyncio.gather(*(disturbed.ask(client, prompt, 4) for prompt in batch))
    await disturbed.assert_right_afterwards()
    return outcomes


@pytest.mark.slow
async def counted(disturbed: Disturbed, kind: str, at_least: int) -> int:
    """The counter once it is there; workers tell their load each second."""
    for _ in range(30):
        if disturbed.failures()[kind] >= at_least:
            break
        await asyncio.sleep(0.1)
    return disturbed.failures()[kind]


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_decoding_waits_for_a_layer_0_that_comes_last(disturbed: Disturbed, rounds: int) -> None:
    before = disturbed.faults.counts()["last"]
    assert set(await run(disturbed, rounds, Rule(fault="last", layers=(0,), seconds=0.03))) == {""}
    assert disturbed.faults.counts()["last"] - before >= rounds


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_layer_2_that_got_lost_once_is_sent_again(disturbed: Disturbed, rounds: int) -> None:
    lost, bad = disturbed.faults.counts()["drop"], disturbed.failures()["extent"]
    rule = Rule(fault="drop", layers=(2,), per_ticket=1)
    assert set(await run(disturbed, rounds, rule)) == {""}
    lost = disturbed.faults.counts()["drop"] - lost
    assert lost == rounds
    assert await counted(disturbed, "extent", bad + lost) == bad + lost


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_without_layer_2_no_request_gets_wrong_text(disturbed: Disturbed, rounds: int) -> None:
    bad = disturbed.failures()["extent"]
    outcomes = await run(disturbed, rounds, Rule(fault="drop", layers=(2,)))
    assert set(outcomes) <= {"", *CLEAN}
    assert await counted(disturbed, "extent", bad + 2 * rounds) >= bad + 2 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_layer_1_that_comes_twice_changes_nothing(disturbed: Disturbed, rounds: int) -> None:
    before = disturbed.failures()
    assert set(await run(disturbed, rounds, Rule(fault="duplicate", layers=(1,)))) == {""}
    assert disturbed.failures() == before


@pytest.mark.parametrize("rounds", FLIPS)
async def test_a_bit_flipped_in_the_readers_memory_is_always_caught(disturbed: Disturbed, rounds: int) -> None:
    rng = random.Random(rounds)
    flips, bad = disturbed.faults.counts()["flipped"], disturbed.failures()["extent"]
    async with disturbed.client() as client:
        for number in range(2 * rounds):
            layers = (rng.randrange(NUM_LAYERS),)
            disturbed.faults.set(Rule(fault="corrupt", layers=layers, per_ticket=1, skip=rng.randrange(2)))
            assert await disturbed.ask(client, disturbed.prompt(rng.randrange(70, 160)), 3) == "", number
            if disturbed.faults.counts()["flipped"] - flips == rounds:  # a prompt of one extent cannot skip one
                break
    await disturbed.assert_right_afterwards()
    assert disturbed.faults.counts()["flipped"] - flips == rounds
    assert await counted(disturbed, "extent", bad + rounds) == bad + rounds


@pytest.mark.slow
async def test_bits_that_flip_again_and_again_never_become_text(disturbed: Disturbed) -> None:
    assert set(await run(disturbed, 4, Rule(fault="corrupt", layers=(3,)))) <= {"", *CLEAN}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), [("fail_submit", "submit"), ("fail_completion", "completion")])
async def test_a_failed_write_is_sent_again_over_a_new_channel(disturbed: Disturbed, fault: str, kind: str) -> None:
    before = disturbed.failures()[kind]
    assert set(await run(disturbed, 3, Rule(fault=fault, times=1), at_once=1)) == {""}
    assert await counted(disturbed, kind, before + 1) > before


@pytest.mark.slow
async def test_writes_that_always_fail_end_in_a_clean_error(disturbed: Disturbed) -> None:
    before = disturbed.failures()["completion"]
    assert set(await run(disturbed, 2, Rule(fault="fail_completion"))) <= {"", *CLEAN}
    assert await counted(disturbed, "completion", before + 2) >= before + 2


@pytest.mark.slow
async def test_a_reader_that_cannot_be_reached_is_counted(disturbed: Disturbed) -> None:
    before = disturbed.failures()["connect"]
    rules = (Rule(fault="fail_completion", times=1), Rule(fault="fail_connect", times=1))  # closed, then not reached
    assert set(await run(disturbed, 1, *rules)) <= {"", *CLEAN}
    assert await counted(disturbed, "connect", before + 1) == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
async def test_a_layer_that_stalls_ends_with_the_clients_deadline(disturbed: Disturbed, layer: int) -> None:
    disturbed.faults.set(Rule(fault="stall", layers=(layer,), times=1))
    async with disturbed.client() as client:
        assert await disturbed.ask(client, disturbed.prompt(90), 4, timeout_s=1.0) == "deadline_exceeded"
    await disturbed.assert_right_afterwards()
    assert disturbed.faults.counts()["held_fenced"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        Rule(fault="delay", share=0.5, seconds=0.1),
        Rule(fault="reorder", seconds=0.1),
        Rule(fault="throttle", bytes_per_s=1 << 20),
        Rule(fault="late", times=1, seconds=0.02),
    ],
    ids=lambda rule: rule.fault,
)
async def test_writes_that_are_slow_or_out_of_order_arrive(disturbed: Disturbed, rule: Rule) -> None:
    assert set(await run(disturbed, 4, rule)) == {""}


@pytest.mark.slow
async def test_a_channel_whose_end_is_not_confirmed_is_counted_and_harms_nobody(disturbed: Disturbed) -> None:
    before, left = disturbed.failures()["close"], disturbed.faults.counts()["left_on_wire"]
    rules = (Rule(fault="stall", layers=(1,), times=1), Rule(fault="unconfirmed_close", times=1, seconds=0.2))
    disturbed.faults.set(*rules)
    async with disturbed.client() as client:
        assert await disturbed.ask(client, disturbed.prompt(90), 4, timeout_s=1.0) == "deadline_exceeded"
    for _ in range(100):
        if disturbed.faults.counts()["left_on_wire"] > left:
            break
        await asyncio.sleep(0.1)
    await disturbed.assert_right_afterwards()
    assert await counted(disturbed, "close", before + 1) == before + 1
    text = httpx.get(f"{disturbed.cluster.url}/metrics", timeout=5).text
    assert 'pdray_worker_transfer_failures_total{kind="close",role="prefill",worker="prefill-0"}' in text
