"""Each scheduling setting, in the smallest situation that shows it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.errors import ConfigError
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, ReserveSequence, Sampling
from services.engine.policies import POLICIES
from services.engine.scheduler import Scheduler, Step
from services.engine.waste import KVWaste, waste_of
from services.engine_config import POLICIES as POLICY_NAMES
from services.engine_config import EngineConfig

SIZE = 4
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=SIZE, layout_version=1)


def make(
    num_blocks: int = 64, budget: int = 16, max_seqs: int = 8, prefix_cache: bool = True, **rules: Any
) -> Scheduler:
    limits = Limits(num_blocks, SIZE, 4096, vocab_size=100_000)
    pool = BlockPool(num_blocks, prefix_cache)
    return Scheduler(pool, limits, max_num_batched_tokens=budget, max_num_seqs=max_seqs, rules=EngineConfig(**rules))


def request(seq_id: str, length: int, max_tokens: int = 8, same: int = 0) -> AddSequence:
    """A prompt of its own, or one that depends on ``same`` alone."""
    rng = random.Random(same or seq_id)
    ids = tuple(rng.randrange(100_000) for _ in range(length))
    return AddSequence(
        seq_id=seq_id,
        prompt_ids=ids,
        sampling=Sampling(max_tokens=max_tokens),
        root=ROOT,
        block_names=tuple(block_names(ids, SIZE, ROOT)),
    )


def step(scheduler: Scheduler) -> Step:
    plan = scheduler.schedule()
    scheduler.complete(plan, {key: 7 for w in plan.work for key, _ in w.draws}, {})
    scheduler.roster.check()
    return plan


def counts(plan: Step) -> dict[str, int]:
    return {w.sequence.seq_id: w.count for w in plan.work}


def run(scheduler: Scheduler) -> list[Step]:
    plans = []
    while scheduler.roster.sequences:
        plans.append(step(scheduler))
        assert len(plans) < 2_000
    return plans


def test_a_long_prompt_gets_small_chunks_while_others_are_there_and_whole_ones_alone() -> None:
    scheduler = make(long_prefill_threshold_tokens=5)
    scheduler.add(request("long", 60))
    assert counts(step(scheduler)) == {"long": 16}
    scheduler.add(request("short", 4, max_tokens=3))
    assert [counts(step(scheduler)) for _ in range(4)] == [
        {"long": 5, "short": 4},
        {"short": 1, "long": 5},
        {"short": 1, "long": 5},
        {"long": 16},
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("hand_off", [False, True])
def test_twenty_short_prompts_behind_one_of_3000_tokens_answer_in_a_quarter_of_its_time(
    policy: str, hand_off: bool
) -> None:
    scheduler = make(num_blocks=2000, budget=256, max_seqs=64, policy=policy)
    scheduler.add(dataclasses.replace(request("long", 3000, max_tokens=2), hand_off=hand_off))
    step(scheduler)
    for i in range(20):
        scheduler.add(dataclasses.replace(request(f"short-{i}", 10, max_tokens=2), hand_off=hand_off))
    answered: dict[str, int] = {}
    while "long" not in answered:
        for work in step(scheduler).work:
            if work.sequence.num_outputs:
                answered.setdefault(work.sequence.seq_id, scheduler.roster.clock)
    shorts = [clock for seq_id, clock in answered.items() if seq_id != "long"]
    assert len(shorts) == 20
    assert max(shorts) - 256 <= answered["long"] / 4, policy


def test_without_mixed_batches_a_step_is_decodes_or_prompts_and_neither_starves() -> None:
    scheduler = make(mixed_batches=False)
    scheduler.add(request("a", 8, max_tokens=20))
    step(scheduler)
    scheduler.add(request("b", 60))
    plans = [step(scheduler) for _ in range(8)]
    kinds = [{w.is_decode for w in p.work} for p in plans]
    assert all(len(k) == 1 for k in kinds)
    assert [next(iter(k)) for k in kinds] == [True, False] * 4
    run(scheduler)


def test_prompts_are_computed_in_every_third_step_while_sequences_decode_and_in_every_step_else() -> None:
    scheduler = make(prefill_interval_steps=3)
    scheduler.add(request("a", 8, max_tokens=8))
    step(scheduler)
    scheduler.add(request("b", 200, max_tokens=1))
    plans = run(scheduler)
    with_prompts = [any(not w.is_decode for w in p.work) for p in plans]
    assert with_prompts[:7] == [False, False, True, False, False, True, False]
    assert all(with_prompts[7:])  # "a" has ended


def test_the_watermark_keeps_blocks_free_at_admission_and_counts_whom_it_stops() -> None:
    scheduler = make(num_blocks=20, budget=64, admission_watermark=0.25)
    scheduler.add(request("a", 32, max_tokens=4))
    scheduler.add(request("b", 28, max_tokens=4))
    assert list(counts(step(scheduler))) == ["a"]
    assert step(scheduler).waiting == {"watermark": 1}
    assert scheduler.roster.pool.counts().free >= 5
    assert scheduler.admission.held_back == 1
    run(scheduler)
    scheduler.add(request("alone", 72, max_tokens=4))
    assert list(counts(step(scheduler))) == ["alone"]  # nobody else would profit


@pytest.mark.parametrize("seed", range(5))
def test_no_admission_beside_others_leaves_fewer_blocks_than_the_watermark(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(num_blocks=40, budget=32, admission_watermark=0.2)
    for i in range(40):
        scheduler.add(request(f"{seed}-{i}", rng.randint(1, 50), max_tokens=rng.randint(1, 30)))
    while scheduler.roster.sequences:
        before = scheduler.roster.sequences.keys() & scheduler.roster.running.keys()
        plan = scheduler.schedule()
        placed = scheduler.roster.running.keys() - before
        counts_now = scheduler.roster.pool.counts()
        if placed and len(scheduler.roster.running) > 1:
            assert counts_now.free + counts_now.cached >= 8, f"seed {seed}, step {plan.number}"
        scheduler.complete(plan, {key: 7 for w in plan.work for key, _ in w.draws}, {})


def preemptions(reserve_output: float, seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    scheduler = make(num_blocks=40, budget=64, reserve_output=reserve_output)
    for i in range(30):
        scheduler.add(request(f"{seed}-{i}", rng.randint(4, 20), max_tokens=rng.randint(10, 60)))
    run(scheduler)
    return scheduler.roster.preemptions, scheduler.admission.mispredictions


@pytest.mark.parametrize("seed", range(3))
def test_blocks_set_aside_for_output_spare_preemptions(seed: int) -> None:
    without, _ = preemptions(0.0, seed)
    whole, mispredicted = preemptions(1.0, seed)
    assert without > 0
    assert (whole, mispredicted) == (0, 0), f"seed {seed}"  # all use their max_tokens, so the learned share stays 1


def test_the_share_of_max_tokens_is_learned_and_who_outgrows_it_is_counted_once() -> None:
    scheduler = make(num_blocks=64, budget=64, reserve_output=1.0)
    short = [request(f"s{i}", 4, max_tokens=100) for i in range(40)]
    for message in short:
        scheduler.add(message)
        plan = scheduler.schedule()
        scheduler.complete(plan, {key: 7 for w in plan.work for key, _ in w.draws}, {})
        seq = scheduler.roster.sequences[message.seq_id]
        scheduler.admission.ended(seq, 10)
        scheduler.release(message.seq_id)
    assert scheduler.admission.output_share == pytest.approx(0.1, abs=0.02)
    scheduler.add(request("long", 4, max_tokens=100))
    step(scheduler)
    assert scheduler.roster.sequences["long"].expected_blocks < 8
    run(scheduler)
    assert scheduler.admission.mispredictions == 1


def test_in_a_static_batch_nobody_enters_before_all_ended() -> None:
    scheduler = make(batching="static", max_seqs=3, budget=64)
    for i, max_tokens in enumerate([2, 9, 4, 3, 3]):
        scheduler.add(request(str(i), 4, max_tokens=max_tokens))
    together = [set(counts(p)) for p in run(scheduler)]
    assert together[0] == {"0", "1", "2"}
    assert together[8] == {"1"}  # the others' places stay empty
    assert together[9:] == [{"3", "4"}] * 3


def test_request_batching_runs_one_at_a_time() -> None:
    scheduler = make(batching="request", max_seqs=8, budget=64)
    for i in range(4):
        scheduler.add(request(str(i), 4, max_tokens=3))
    assert [list(counts(p)) for p in run(scheduler)] == [[str(i)] for i in range(4) for _ in range(3)]


def test_the_same_load_waits_longer_in_static_batches_and_longest_one_by_one() -> None:
    waits = {}
    for batching in ("continuous", "static", "request"):
        rng = random.Random(11)
        scheduler = make(num_blocks=400, budget=64, max_seqs=4, batching=batching)
        for i in range(24):
            scheduler.add(request(str(i), rng.randint(4, 20), max_tokens=rng.randint(1, 40)))
        started = [plan.number for plan in run(scheduler) for _ in plan.started]
        waits[batching] = sum(started) / len(started)
    assert waits["continuous"] < 0.8 * waits["static"] < 0.8 * waits["request"], waits


def test_without_a_prefix_cache_equal_prompts_are_computed_anew_and_do_not_wait_for_each_other() -> None:
    scheduler = make(budget=64, prefix_cache=False)
    for i in range(3):
        scheduler.add(request(str(i), 20, max_tokens=1, same=1))
    assert counts(step(scheduler)) == {"0": 20, "1": 20, "2": 20}
    assert scheduler.roster.pool.counts().cached == 0
    assert scheduler.roster.prompt_tokens_cached == 0


def test_waste_is_slots_behind_the_last_token_and_blocks_no_chunk_has_reached() -> None:
    scheduler = make(budget=8)
    scheduler.add(request("a", 21, max_tokens=8))
    step(scheduler)
    assert waste_of(scheduler.roster.running.values(), SIZE) == KVWaste(unused_tokens=3, unwritten_blocks=4)
    for _ in range(2):
        step(scheduler)
    assert waste_of(scheduler.roster.running.values(), SIZE) == KVWaste(unused_tokens=2, unwritten_blocks=0)
    scheduler.reserve(ReserveSequence(sequence=request("b", 9)))
    step(scheduler)
    assert scheduler.roster.pool.counts().reserved == 3


def test_every_policy_that_may_be_set_exists() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "random"),
        ("batching", "dynamic"),
        ("prefix_cache", "radix"),
        ("eviction", "fifo"),
        ("ageing_bound_tokens", 0),
        ("prefill_interval_steps", 0),
        ("long_prefill_threshold_tokens", -1),
        ("lpm_queue_bound", -1),
        ("admission_watermark", 1.0),
        ("admission_watermark", float("nan")),
        ("reserve_output", -0.1),
        ("reserve_output", float("inf")),
    ],
)
def test_nonsense_is_refused_by_its_setting(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.{name} must"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]
