"""The policies for comparison, by numbers that are worked out by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.config import PAIR_POLICIES
from services.router.plan import ask
from services.router.policy import POLICIES, choose
from services.router.policy_types import NO_DRAWS, Draws, Fabric, Prompt, Worker

PROMPT = Prompt(num_tokens=512, block_size=16, token_bytes=1000, num_layers=4)  # 32 blocks, 31 of them reusable


def worker(worker_id: str, **known: object) -> Worker:
    role = {"p": "prefill", "d": "decode", "m": "mixed"}[worker_id[0]]
    return Worker(**{"worker_id": worker_id, "role": role, "num_blocks": 1000, "free_blocks": 1000} | known)


def pick(policy: str, *workers: Worker, turn: int = 0, draws: Draws = NO_DRAWS) -> str:
    decision = choose(policy, PROMPT, workers, Fabric(), turn, draws)
    assert decision is not None
    assert decision.policy == policy
    return f"{decision.choice.prefill_id}>{decision.choice.decode_id}"


def test_the_setting_takes_every_policy_there_is() -> None:
    assert PAIR_POLICIES == POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_a_mixed_worker_where_there_is_nothing_else(policy: str) -> None:
    assert pick(policy, worker("m0")) == "m0>"


# --- power of two ---


def test_power_of_two_takes_the_less_loaded_of_the_two_that_were_drawn() -> None:
    workers = [worker(f"p{i}", queued_tokens=q) for i, q in enumerate((300, 200, 100, 0))]
    workers += [worker(f"d{i}", active_sequences=n) for i, n in enumerate((4, 3, 2, 1))]
    # 0.0 draws the first; of the three others 0.0 is the next one: p0 against p1, d0 against d1.
    assert pick("power-of-two", *workers) == "p1>d1"
    # 0.5 of four is p2, and 0.99 of the three others the third after it, p1; d3 against d0.
    assert pick("power-of-two", *workers, draws=(0.5, 0.99, 0.75, 0.0)) == "p2>d3"


def test_power_of_two_never_takes_the_most_loaded_one_and_else_follows_the_odds() -> None:
    rng, taken = random.Random(3), Counter[str]()
    workers = [worker(f"p{i}", queued_tokens=100 * i) for i in range(4)] + [worker("d0")]
    for _ in range(6000):
        taken[pick("power-of-two", *workers, draws=ask("", 0, rng.random)[2])] += 1
    # Of 6 equally likely pairs p0 is the better one in 3, p1 in 2, p2 in 1.
    assert taken.keys() == {"p0>d0", "p1>d0", "p2>d0"}
    for name, share in (("p0>d0", 3 / 6), ("p1>d0", 2 / 6), ("p2>d0", 1 / 6)):
        assert taken[name] / 6000 == pytest.approx(share, abs=0.03)


# --- prefix only ---


def test_prefix_only_follows_the_cache_whatever_the_load() -> None:
    workers = [worker("p0"), worker("p1", cached_blocks=3, queued_tokens=10**6), worker("d0"), worker("d1")]
    assert {pick("prefix-only", *workers, turn=t) for t in range(4)} == {"p1>d0", "p1>d1"}
    assert pick("prefix-only", *workers, worker("d2", cached_blocks=1, active_sequences=99)) == "p1>d2"


def test_prefix_only_takes_turns_where_nobody_has_more() -> None:
    workers = [worker("p0"), worker("p1"), worker("d0")]
    assert [pick("prefix-only", *workers, turn=t) for t in range(4)] == ["p0>d0", "p1>d0", "p0>d0", "p1>d0"]


def test_a_block_that_is_computed_anyway_is_no_hit() -> None:
    assert pick("prefix-only", worker("p0", cached_blocks=31), worker("p1", cached_blocks=32), worker("d0")) == "p0>d0"


# --- Dynamo ---


def test_dynamo_weighs_blocks_to_compute_against_blocks_in_use() -> None:
    # p0: (0 + 512) / 16 − 0 + 0 used + 32 = 64.  p1: 32 − 20 + used + 32 = 44 + used.
    assert pick("dynamo", worker("p0"), worker("p1", cached_blocks=20, free_blocks=981), worker("d0")) == "p1>d0"
    assert pick("dynamo", worker("p0"), worker("p1", cached_blocks=20, free_blocks=979), worker("d0")) == "p0>d0"
    assert pick("dynamo", worker("p0"), worker("p1", cached_blocks=20, free_blocks=980), worker("d0")) == "p0>d0"


def test_dynamo_counts_queued_tokens_as_blocks() -> None:
    # 319 tokens are 19.9 blocks, less than the 20 that are cached; 321 are more.
    assert pick("dynamo", worker("p0"), worker("p1", cached_blocks=20, queued_tokens=319), worker("d0")) == "p1>d0"
    assert pick("dynamo", worker("p0"), worker("p1", cached_blocks=20, queued_tokens=321), worker("d0")) == "p0>d0"


def test_dynamo_looks_at_no_cache_where_it_decodes() -> None:
    assert pick("dynamo", worker("p0"), worker("d0"), worker("d1", cached_blocks=31, free_blocks=999)) == "p0>d0"
    assert pick("dynamo", worker("p0"), worker("d0", free_blocks=998), worker("d1", free_blocks=999)) == "p0>d1"


# --- llm-d ---


def test_llm_d_adds_weighted_scores_between_0_and_1() -> None:
    # p0: 3 × 0 + 2 × 1 (shortest) + 2 × 1 (all free) = 4.  p1: 3 × 16/32 + 2 × 0 (longest) + 2 × used share free.
    warm = {"cached_blocks": 16, "queued_tokens": 10}
    assert pick("llm-d", worker("p0"), worker("p1", **warm), worker("d0")) == "p0>d0"  # 1.5 + 0 + 2 = 3.5
    warm["cached_blocks"] = 22  # 3 × 22/32 = 2.06, with 2: 4.06
    assert pick("llm-d", worker("p0"), worker("p1", **warm), worker("d0")) == "p1>d0"
    warm["free_blocks"] = 960  # 2.06 + 1.92 = 3.98
    assert pick("llm-d", worker("p0"), worker("p1", **warm), worker("d0")) == "p0>d0"


def test_llm_d_scores_readers_by_their_cache_too() -> None:
    # d1: 3 × 8/32 + 2 × (4−3)/(4−0) + 2 = 3.25; d0: 2 + 2 = 4; d2: 0 + 0 + 2.
    readers = [worker("d0"), worker("d1", cached_blocks=8, active_sequences=3), worker("d2", active_sequences=4)]
    assert pick("llm-d", worker("p0"), *readers) == "p0>d0"
    readers[1] = worker("d1", cached_blocks=17, active_sequences=3)  # 1.59 + 0.5 + 2 = 4.09
    assert pick("llm-d", worker("p0"), *readers) == "p0>d1"


def test_llm_d_takes_no_prefix_where_no_block_is_full() -> None:
    short = Prompt(num_tokens=15, block_size=16, token_bytes=1000)
    decision = choose("llm-d", short, [worker("p0", queued_tokens=1), worker("p1"), worker("d0")], Fabric())
    assert decision is not None
    assert decision.choice.prefill_id == "p1"
