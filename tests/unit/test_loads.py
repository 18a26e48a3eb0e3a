"""Load or compute: the faster of both, from costs that are learned; on a virtual clock over links of any speed."""

from __future__ import annotations

import random

import pytest

from services.router.fabric import FORGET_S, MAX_FORGET_S, PULL_SETUP_MS, FabricMeter
from services.router.loads import LoadCost, LoadMeter
from services.router.policy import Fabric, Prompt, Worker, choose

# --- learning ---


@pytest.mark.parametrize("true", [LoadCost(setup_ms=20, range_ms=0.5, bytes_per_s=5e7),
                                  LoadCost(setup_ms=1, range_ms=0.01, bytes_per_s=2e10)])  # fmt: skip
def test_all_three_terms_are_found_from_loads_that_differ(true: LoadCost) -> None:
    rng, meter = random.Random(1), LoadMeter(LoadCost(setup_ms=10, range_ms=0.1, bytes_per_s=1e9))
    for _ in range(300):
        size, ranges = rng.randrange(1 << 16, 1 << 28), rng.randrange(1, 200)
        meter.observe(size, ranges, true.ms(size, ranges))
    found = meter.cost()
    assert found.setup_ms == pytest.approx(true.setup_ms, rel=0.1, abs=0.2)
    assert found.range_ms == pytest.approx(true.range_ms, rel=0.1, abs=0.01)
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.05)


def test_loads_of_one_kind_are_predicted_though_their_terms_cannot_be_told_apart() -> None:
    meter = LoadMeter(LoadCost(setup_ms=10, range_ms=0.1, bytes_per_s=1e9))
    for _ in range(20):
        meter.observe(1 << 24, 30, 250.0)
    assert meter.cost().ms(1 << 24, 30) == pytest.approx(250, rel=0.02)


def test_no_term_falls_below_zero() -> None:
    meter = LoadMeter(LoadCost(setup_ms=10, bytes_per_s=1e9))
    for size, took_ms in ((1 << 20, 5.0), (1 << 26, 100.0), (1 << 27, 300.0)) * 5:
        meter.observe(size, 0, took_ms)
    cost = meter.cost()
    assert min(cost.setup_ms, cost.range_ms, cost.bytes_per_s) >= 0


def test_a_link_that_changes_is_learned_anew() -> None:
    meter = LoadMeter(LoadCost(setup_ms=10, bytes_per_s=1e9))
    for rate in (1e9, 1e8, 2e9):
        for _ in range(60):
            meter.observe(1 << 26, 0, LoadCost(setup_ms=10, bytes_per_s=rate).ms(1 << 26))
        assert meter.cost().ms(1 << 26) == pytest.approx(10 + 1000 * (1 << 26) / rate, rel=0.1)


def test_a_load_without_bytes_or_an_assumed_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="has bytes"):
        LoadMeter(LoadCost()).observe(0, 1, 5.0)
    with pytest.raises(ValueError, match="must be positive"):
        LoadMeter(LoadCost(bytes_per_s=0))


# --- the router as a whole: a conversation's KV lies on d0, and p0 loads it or computes it ---

PROMPT = Prompt(num_tokens=8192, block_size=16, token_bytes=20_000, num_layers=30)
WORKERS = (
    Worker(worker_id="p0", role="prefill", prefill_tokens_per_s=4000, num_blocks=4096, free_blocks=4096),
    Worker(worker_id="d0", role="decode", cached_blocks=450, num_blocks=4096, free_blocks=4096),
)


@pytest.mark.parametrize(("range_ms", "holder"), [(50.0, "d0"), (60.0, "")])
def test_many_small_ranges_make_a_fast_source_slow(range_ms: float, holder: str) -> None:
    way = LoadCost(range_ms=range_ms, bytes_per_s=1e9)  # 30 layers and 144 MB: 1,644 or 1,944 ms against 1,800
    decision = choose("cost", PROMPT, WORKERS, Fabric(pull_setup_ms=10.0, loads={("d0", "p0"): way}))
    assert decision is not None
    assert decision.choice.holder_id == holder


PULL_MS = 2000.0
"""As transfer.pull_ms: what is not there by then is computed."""


def served(rates: list[float], every_s: float) -> tuple[float, float, float, int]:
    """Seconds that all prompts take with the router's choice, always computed, always loaded; and loads begun."""
    now_s, total_ms, computed_ms, loaded_ms, loads = 0.0, 0.0, 0.0, 0.0, 0
    meter = FabricMeter(lambda: now_s)
    full_ms = 1000 * 8192 / 4000
    rest_ms = 1000 * (8192 - 450 * 16) / 4000
    num_bytes = 450 * 16 * PROMPT.token_bytes
    for rate in rates:
        wire_ms = 1000 * num_bytes / rate
        decision = choose("cost", PROMPT, WORKERS, meter.now())
        assert decision is not None
        computed_ms += full_ms
        load_ms = PULL_SETUP_MS + wire_ms + rest_ms if wire_ms <= PULL_MS else PULL_MS + full_ms
        loaded_ms += load_ms
        if decision.choice.holder_id:
            loads += 1
            total_ms += load_ms
            meter.observe_pull(("d0", "p0"), num_bytes if wire_ms <= PULL_MS else 0, wire_ms)
        else:
            total_ms += full_ms
        now_s += every_s
    return total_ms, computed_ms, loaded_ms, loads


@pytest.mark.parametrize("rate", [1e6, 2e7, 6e7, 7e7, 9e7, 1.1e8, 3e8, 1e9, 2e10])
def test_a_slow_link_computes_a_fast_one_loads_and_neither_is_missed_by_a_tenth(rate: float) -> None:
    total_ms, computed_ms, loaded_ms, loads = served([rate] * 400, every_s=2.0)
    assert total_ms <= 1.1 * min(computed_ms, loaded_ms)
    if loaded_ms < 0.9 * computed_ms:
        assert loads >= 0.95 * 400
    if loaded_ms > 1.1 * computed_ms:
        assert loads <= 0.05 * 400


def test_a_link_that_turns_slow_and_fast_again_is_followed() -> None:
    rates = [1e9] * 200 + [5e6] * 400 + [1e9] * 600
    total_ms, *_ = served(rates, every_s=2.0)
    parts = [served(rates[a:b], every_s=2.0) for a, b in ((0, 200), (200, 600), (600, 1200))]
    best_ms = sum(min(computed, loaded) for _, computed, loaded, _ in parts)
    # After the slow time the way is tried again within MAX_FORGET_S at most, 240 prompts here.
    late_ms = MAX_FORGET_S / 2.0 * 1000 * 450 * 16 / 4000
    assert total_ms <= 1.1 * best_ms + late_ms
    assert FORGET_S <= MAX_FORGET_S
