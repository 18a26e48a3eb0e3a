"""Measured bandwidth between pairs."""

from __future__ import annotations

import pytest

from services.router.fabric import DEFAULT_BYTES_PER_S, FORGET_S, PULL_SETUP_MS, FabricMeter

PAIR = ("p0", "d0")
MB = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> FabricMeter:
    return FabricMeter(clock)


def test_a_pair_is_assumed_fast_until_it_is_measured(meter: FabricMeter) -> None:
    assert meter.now().bandwidth(*PAIR) == DEFAULT_BYTES_PER_S


def test_a_hand_off_that_outlasts_the_computing_measures_the_wire(meter: FabricMeter) -> None:
    meter.observe(PAIR, 20 * MB, compute_ms=100, exposed_ms=100)
    assert meter.now().bandwidth(*PAIR) == pytest.approx(100 * MB)
    assert meter.now().bandwidth("p0", "d1") == DEFAULT_BYTES_PER_S
    meter.observe(PAIR, 40 * MB, compute_ms=100, exposed_ms=100)
    assert meter.now().bandwidth(*PAIR) == pytest.approx(130 * MB)


def test_a_hidden_hand_off_says_nothing_but_that_the_wire_is_at_least_so_fast(meter: FabricMeter) -> None:
    meter.observe(PAIR, 20 * MB, compute_ms=100, exposed_ms=1)
    assert meter.now().measured == {}
    meter.observe(PAIR, 2 * MB, compute_ms=100, exposed_ms=100)
    meter.observe(PAIR, 20 * MB, compute_ms=100, exposed_ms=1)
    assert meter.now().bandwidth(*PAIR) == pytest.approx(20 * MB / 0.101)


def test_the_last_layer_of_a_long_prompt_is_no_slow_wire(meter: FabricMeter) -> None:
    # 20 GB in 8 s of computing, 21 ms after it: the wire may be many times as fast as that.
    meter.observe(PAIR, 20_000 * MB, compute_ms=8000, exposed_ms=21)
    assert meter.now().measured == {}
    meter.observe(PAIR, 20_000 * MB, compute_ms=8000, exposed_ms=2000)
    assert meter.now().bandwidth(*PAIR) == pytest.approx(2000 * MB)


def test_hand_offs_too_small_to_measure_anything_are_left_out(meter: FabricMeter) -> None:
    meter.observe(PAIR, 4096, compute_ms=10, exposed_ms=50)
    meter.observe(PAIR, 20 * MB, compute_ms=0, exposed_ms=0)
    assert meter.now().measured == {}


def test_a_slow_measurement_is_forgotten_so_that_the_pair_is_tried_again(meter: FabricMeter, clock: Clock) -> None:
    meter.observe(PAIR, 2 * MB, compute_ms=0, exposed_ms=2000)
    clock.now_s += FORGET_S + 1
    assert meter.now().bandwidth(*PAIR) == DEFAULT_BYTES_PER_S


def test_a_pull_measures_its_own_way_and_no_other(meter: FabricMeter) -> None:
    meter.observe_pull(("d0", "p0"), 20 * MB, wire_ms=100)
    assert meter.now().bandwidth("d0", "p0") == pytest.approx(200 * MB)
    assert meter.now().bandwidth("p0", "d0") == DEFAULT_BYTES_PER_S
    meter.observe_pull(("d0", "p0"), 20 * MB, wire_ms=50)
    assert meter.now().bandwidth("d0", "p0") == pytest.approx(260 * MB)
    meter.observe_pull(("d0", "p0"), 1000, wire_ms=50)  # measures nothing
    assert meter.now().bandwidth("d0", "p0") == pytest.approx(260 * MB)


def test_a_holder_that_did_not_deliver_is_not_asked_for_a_while(meter: FabricMeter, clock: Clock) -> None:
    meter.observe_pull(("d0", "p0"), 0, wire_ms=0)
    assert meter.now().bandwidth("d0", "p0") == 1.0
    clock.now_s = FORGET_S + 1
    assert meter.now().bandwidth("d0", "p0") == DEFAULT_BYTES_PER_S


def test_no_pull_is_planned_where_they_are_off(clock: Clock) -> None:
    assert FabricMeter(clock, pulls=False).now().pull_setup_ms is None
    assert FabricMeter(clock).now().pull_setup_ms == PULL_SETUP_MS


def test_the_fastest_way_is_at_least_as_fast_as_any_that_is_known_or_assumed(meter: FabricMeter, clock: Clock) -> None:
    assert meter.now().fastest_bytes_per_s == DEFAULT_BYTES_PER_S
    meter.observe_pull(("d0", "p0"), 2000 * MB, wire_ms=500)
    meter.observe(PAIR, 20 * MB, compute_ms=100, exposed_ms=100)
    fabric = meter.now()
    rates = [*fabric.measured.values(), *(cost.bytes_per_s for cost in fabric.loads.values())]
    assert fabric.fastest_bytes_per_s == max(rates) > DEFAULT_BYTES_PER_S
    clock.now_s = FORGET_S + 1
    assert meter.now().fastest_bytes_per_s == DEFAULT_BYTES_PER_S
