"""When requests are due: the gaps have the distribution they are named after."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.bench.load.arrivals import Floats, Ramp, ramped, steady, unit_gaps

COUNT = 4000
KS_1_PERCENT = 1.628  # the Kolmogorov distribution's 99th percentile


def ks(values: Floats, cdf: Callable[[float], float]) -> float:
    """√n times the greatest distance between the sample's distribution and ``cdf``."""
    ordered = np.sort(values)
    theory = np.array([cdf(float(x)) for x in ordered])
    n = len(ordered)
    ranks = np.arange(1, n + 1) / n
    return math.sqrt(n) * float(np.maximum(ranks - theory, theory - (ranks - 1 / n)).max())


def exponential(x: float) -> float:
    return 1 - math.exp(-x)


CDFS: dict[float, Callable[[float], float]] = {
    1.0: exponential,
    0.5: lambda x: math.erf(math.sqrt(x / 2)),  # gamma of shape 1/2, mean 1
    3.0: lambda x: 1 - math.exp(-3 * x) * (1 + 3 * x + 4.5 * x * x),  # Erlang of shape 3, mean 1
}


@pytest.mark.parametrize("burstiness", sorted(CDFS))
@pytest.mark.parametrize("seed", range(3))
def test_gaps_pass_a_ks_test_against_their_own_distribution(burstiness: float, seed: int) -> None:
    at_s = steady(unit_gaps(COUNT, burstiness, np.random.default_rng(seed)), rate_rps=20.0)
    assert ks(np.diff(at_s) * 20.0, CDFS[burstiness]) < KS_1_PERCENT, f"seed {seed}"


@pytest.mark.parametrize("burstiness", [0.5, 3.0, math.inf])
def test_the_ks_test_tells_other_arrivals_from_poisson(burstiness: float) -> None:
    gaps = np.diff(steady(unit_gaps(COUNT, burstiness, np.random.default_rng(0)), 20.0))
    assert ks(gaps * 20.0, exponential) > KS_1_PERCENT


def test_a_constant_rate_has_equal_gaps_from_zero() -> None:
    at_s = steady(unit_gaps(5, math.inf, np.random.default_rng(0)), 10.0)
    assert at_s.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert set(steady(unit_gaps(9, 1.0, np.random.default_rng(0)), math.inf).tolist()) == {0.0}


def test_equal_seeds_give_equal_arrivals_and_others_do_not() -> None:
    made = [unit_gaps(50, 1.0, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


RAMPS = [
    Ramp(strategy="linear", start_rps=2, end_rps=20),
    Ramp(strategy="linear", start_rps=20, end_rps=2),
    Ramp(strategy="exponential", start_rps=1, end_rps=30),
    Ramp(strategy="exponential", start_rps=30, end_rps=1),
    Ramp(strategy="linear", start_rps=7, end_rps=7),
]


def rate(ramp: Ramp, at_s: Floats, total_s: float) -> Floats:
    part = np.minimum(at_s / total_s, 1.0)
    if ramp.strategy == "linear":
        return ramp.start_rps + (ramp.end_rps - ramp.start_rps) * part
    return ramp.start_rps * (ramp.end_rps / ramp.start_rps) ** part


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_the_expected_count_is_the_integral_of_the_rate(ramp: Ramp) -> None:
    total_s = ramp.duration_s(400)
    step_s = 1.2 * total_s / 200_000
    middles = (np.arange(200_000) + 0.5) * step_s
    summed = np.cumsum(rate(ramp, middles, total_s)) * step_s
    ends = middles + step_s / 2
    assert np.abs(ramp.expected(ends, 400) - summed).max() < 1e-3
    assert float(ramp.expected(np.array([total_s]), 400)[0]) == pytest.approx(400)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
@given(units=st.lists(st.floats(0, 600), min_size=1, max_size=20))
def test_moments_are_the_inverse_of_the_expected_count(ramp: Ramp, units: list[float]) -> None:
    asked = np.array(units)
    assert ramp.expected(ramp.moments(asked, 400), 400).tolist() == pytest.approx(units, abs=1e-6)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_a_ramp_is_poisson_once_its_clock_is_bent_straight(ramp: Ramp) -> None:
    at_s = ramped(unit_gaps(COUNT, 1.0, np.random.default_rng(5)), ramp)
    assert ks(np.diff(ramp.expected(at_s, COUNT)), exponential) < KS_1_PERCENT


def test_nonsense_is_refused_with_its_option() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="--burstiness"):
        unit_gaps(3, 0.0, rng)
    with pytest.raises(ConfigError, match="--request-rate"):
        steady(np.ones(3), -1.0)
    with pytest.raises(ConfigError, match="--ramp-up-strategy"):
        Ramp(strategy="cubic", start_rps=1, end_rps=2)
    with pytest.raises(ConfigError, match="--ramp-up-start-rps"):
        Ramp(strategy="linear", start_rps=0, end_rps=2)
