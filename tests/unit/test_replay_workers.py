"""Simulated workers: nothing is lost, nobody is passed, and times are those of the cost model."""

from __future__ import annotations

import heapq
import random

import pytest

from services.replay.costs import COST_MODELS, CostModel
from services.replay.decode import Answer, DecodeWorker
from services.replay.links import Links
from services.replay.prefill import PrefillWorker, Prompt

COSTS = CostModel(
    prefill_token_ms=0.1, attention_ms=1e-5, prefill_step_ms=5.0, chunk_tokens=100, decode_step_ms=10.0,
    decode_sequence_ms=1.0, decode_context_ms=0.001, token_bytes=1000, num_layers=10, cache_tokens=1600,
    link_bytes_per_s=1e6, transfer_setup_ms=2.0,
)  # fmt: skip
SIZE = 16


def names(first: int, count: int) -> list[bytes]:
    return [bytes([first, i]) + bytes(14) for i in range(count)]


def prompt(request_id: str, tokens: int, first: int = 0, held: int = 0) -> Prompt:
    return Prompt(request_id, tokens, names(first, tokens // SIZE), held_blocks=held)


def answer(request_id: str, tokens: int, outputs: int, first: int = 0) -> Answer:
    return Answer(request_id, tokens, outputs, names(first, tokens // SIZE))


def drained(worker: PrefillWorker, release: bool = True) -> tuple[list[tuple[str, float]], float]:
    """Run until nothing is left: who was done when (ms), and how long it took."""
    done, now_ms = [], 0.0
    while True:
        worker.place(COSTS.chunk_tokens)
        step = worker.begin(now_ms / 1000)
        if step is None:
            return done, now_ms
        assert sum(tokens for _, tokens in step.chunks) <= COSTS.chunk_tokens
        now_ms += step.duration_ms
        for finished in worker.end(step):
            done.append((finished.request_id, now_ms))
            if release:
                worker.release(finished.request_id)
        worker.pool.check()


# --- prefill ---


def test_a_prompt_takes_as_long_as_its_chunks() -> None:
    worker = PrefillWorker.of(COSTS, SIZE)
    worker.submit(prompt("a", 250))
    chunks = [COSTS.chunk_ms(0, 100), COSTS.chunk_ms(100, 100), max(5.0, COSTS.chunk_ms(200, 50))]
    done, _ = drained(worker)
    assert done == [("a", pytest.approx(sum(chunks)))]
    assert sum(chunks) == pytest.approx(10 + 10 + 5.0 + 1e-5 * (100 * 49.5 + 100 * 149.5 + 50 * 224.5), rel=0.02)


def test_first_come_first_served_and_short_prompts_share_a_step() -> None:
    worker = PrefillWorker.of(COSTS, SIZE)
    for i, tokens in enumerate((150, 30, 30, 120)):
        worker.submit(prompt(str(i), tokens, first=i))
    done, _ = drained(worker)
    assert [name for name, _ in done] == ["0", "1", "2", "3"]
    assert worker.steps == 4  # 100 | 50 + 30 + 20 | 10 + 90 | 30


@pytest.mark.parametrize("seed", range(5))
def test_computed_and_cached_tokens_are_all_there_are_and_no_block_is_lost(seed: int) -> None:
    rng, worker, total = random.Random(seed), PrefillWorker.of(COSTS, SIZE), 0
    prompts = [prompt(str(i), rng.randrange(1, 500), first=rng.randrange(6)) for i in range(60)]
    for one in prompts:
        worker.submit(one)
        total += one.num_tokens
    assert worker.missing_tokens == total
    done, took_ms = drained(worker)
    assert [name for name, _ in done] == [one.request_id for one in prompts]
    assert worker.tokens_computed + sum(one.cached_tokens for one in prompts) == total
    assert all(one.cached_tokens < one.num_tokens for one in prompts)
    assert any(one.cached_tokens for one in prompts)
    assert took_ms >= worker.tokens_computed * COSTS.prefill_token_ms
    assert (worker.missing_tokens, worker.pool.counts().used) == (0, 0)


def test_a_prompt_that_finds_no_blocks_waits_and_lets_none_pass() -> None:
    worker = PrefillWorker.of(COSTS, SIZE)
    for i, tokens in enumerate((1500, 1500, 16)):
        worker.submit(prompt(str(i), tokens, first=i))
    done, _ = drained(worker, release=False)
    assert [name for name, _ in done] == ["0"]
    worker.release("0")
    done, _ = drained(worker)
    assert [name for name, _ in done] == ["1", "2"]


def test_a_prompt_that_loads_lets_others_pass_and_computes_only_the_rest() -> None:
    worker = PrefillWorker.of(COSTS, SIZE)
    first = prompt("0", 400, held=20)
    worker.submit(first)
    worker.submit(prompt("1", 50, first=1))
    placed = worker.place(COSTS.chunk_tokens)
    assert ([p.request_id for p in placed], first.loaded_tokens) == (["0", "1"], 320)
    assert worker.missing_tokens == 450
    done, _ = drained(worker)
    assert [name for name, _ in done] == ["1"]
    worker.loaded("0")
    assert worker.missing_tokens == 80
    drained(worker)
    assert worker.tokens_computed == 50 + 80
    assert worker.pool.lookup(names(0, 25)) == 25


# --- decode ---


def finished(worker: DecodeWorker, joins: list[tuple[float, Answer]]) -> dict[str, float]:
    """Let them join at their seconds, and say when each was done."""
    ends: dict[str, float] = {}
    events = [(at_s, 1, i) for i, (at_s, _) in enumerate(joins)]
    heapq.heapify(events)
    while events or worker.active:
        end_s = worker.next_end_s()
        if end_s is not None and (not events or end_s <= events[0][0]):
            for one in worker.finish(end_s):
                ends[one.request_id] = end_s
        else:
            at_s, _, i = heapq.heappop(events)
            worker.reserve(joins[i][1])
            assert worker.grants() == [joins[i][1]]
            worker.join(joins[i][1], at_s)
        worker.pool.check()
    return ends


def test_a_sequence_alone_takes_a_step_for_each_token() -> None:
    ends = finished(DecodeWorker.of(COSTS, SIZE), [(1.0, answer("a", 100, 51))])
    steps_ms = sum(COSTS.decode_ms(1, 101 + i) for i in range(50))
    assert 1000 * (ends["a"] - 1.0) == pytest.approx(steps_ms, rel=1e-3)


def stepwise(joins: list[tuple[float, Answer]]) -> dict[str, float]:
    """The same, step by step: who is there when a step begins gets a token when it ends."""
    now_ms, waiting, ends = 0.0, sorted(joins, key=lambda j: j[0]), {}
    active: dict[str, list[int]] = {}
    while waiting or active:
        if not active:
            now_ms = max(now_ms, 1000 * waiting[0][0])
        while waiting and 1000 * waiting[0][0] <= now_ms:
            one = waiting.pop(0)[1]
            active[one.request_id] = [one.num_tokens + 1, one.output_tokens - 1]
        now_ms += COSTS.decode_ms(len(active), sum(context for context, _ in active.values()))
        for name in list(active):
            active[name][0] += 1
            active[name][1] -= 1
            if active[name][1] <= 0:
                ends[name] = now_ms / 1000
                del active[name]
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_time_by_formula_is_time_by_steps_within_a_few_steps(seed: int) -> None:
    rng = random.Random(seed)
    joins = [(rng.random() * 3, answer(str(i), rng.randrange(16, 60), rng.randrange(20, 80), i)) for i in range(12)]
    fluid, exact = finished(DecodeWorker.of(COSTS, SIZE), joins), stepwise(joins)
    assert fluid.keys() == exact.keys()
    longest_s = COSTS.decode_ms(12, 12 * 140) / 1000
    for name, end_s in exact.items():
        assert fluid[name] == pytest.approx(end_s, abs=4 * longest_s)


def test_tokens_are_conserved_and_blocks_come_back() -> None:
    worker = DecodeWorker.of(COSTS, SIZE)
    finished(worker, [(0.1 * i, answer(str(i), 64, 10 + i, i)) for i in range(10)])
    assert worker.tokens_made == sum(9 + i for i in range(10))
    assert (worker.pool.counts().used, worker.pool.counts().reserved, worker.context_tokens) == (0, 0, 0.0)


def test_who_finds_no_blocks_waits_in_order_and_hits_are_kept() -> None:
    worker = DecodeWorker.of(COSTS, SIZE)
    asked = [answer("0", 1500, 20), answer("1", 1500, 20), answer("2", 16, 4, 1), answer("3", 1500, 20, 2)]
    for one in asked:
        worker.reserve(one)
    assert worker.grants() == asked[:1]
    worker.join(asked[0], 0.0)
    end_s = worker.next_end_s()
    assert end_s is not None
    assert worker.finish(end_s) == asked[:1]
    assert worker.grants() == asked[1:3]
    assert asked[1].cached_blocks == 93


# --- links and costs ---


def test_a_hand_off_hides_behind_the_computing_but_for_its_last_layer() -> None:
    links = Links(COSTS)  # 100 tokens are 100 ms, and 2 for the set-up
    assert links.hand_off(("p", "d"), 100, 0.0, 10.0) == pytest.approx(10 + 0.002 + 0.010)
    assert links.hand_off(("p", "e"), 100, 0.0, 0.05) == pytest.approx(0.102)


def test_transfers_of_one_way_follow_each_other_and_other_ways_are_free() -> None:
    links = Links(COSTS)
    assert links.move(("d", "p"), 100, 0.0) == pytest.approx(0.102)
    assert links.move(("d", "p"), 100, 0.05) == pytest.approx(0.204)
    assert links.move(("d", "q"), 100, 0.05) == pytest.approx(0.152)


@pytest.mark.parametrize("name", COST_MODELS)
def test_cost_models_are_of_one_piece(name: str) -> None:
    costs = COST_MODELS[name]
    assert costs.chunk_ms(0, 100) + costs.chunk_ms(100, 50) == pytest.approx(costs.chunk_ms(0, 150))
    assert costs.decode_ms(2, 1000) > costs.decode_ms(1, 1000) > costs.decode_ms(1, 0)
    assert costs.token_bytes % (4 * costs.num_layers) == 0
