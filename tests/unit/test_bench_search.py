"""The search for the highest rate: exact where answers are, near the truth where they are noisy, and never endless."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.bench.load.sweep.search import Bounds, Phase, Search


def drive(search: Search, meets: object) -> list[float]:
    """Rates asked until it is over; ``meets`` is a function of (rate, number of the probe)."""
    assert callable(meets)
    asked: list[float] = []
    while (rate := search.next_rate()) is not None:
        search.tell(bool(meets(rate, len(asked))))
        asked.append(rate)
    return asked


@given(
    st.floats(0.02, 5000),
    st.floats(0.01, 10000),
    st.sampled_from([0.02, 0.05, 0.2]),
    st.sampled_from([1, 3, 5]),
)
def test_exact_answers_bracket_the_capacity(capacity: float, start: float, precision: float, repeats: int) -> None:
    search = Search(Bounds(start_rps=start, precision=precision, repeats=repeats, max_probes=200))
    asked = drive(search, lambda rate, _: rate <= capacity)
    assert search.phase is Phase.DONE
    assert search.low_rps is not None
    assert search.high_rps is not None
    assert search.low_rps <= capacity < search.high_rps <= search.low_rps * (1 + precision) * (1 + 1e-9)
    majority = repeats // 2 + 1
    steps = abs(math.log2(start / capacity)) + math.log2(1 / math.log2(1 + precision)) + 4
    assert len(asked) <= steps + 2 * majority
    assert search.reopened == 0


@given(st.integers(0, 10**6), st.floats(0.5, 200))
@settings(max_examples=60)
def test_noisy_answers_end_near_the_capacity(seed: int, capacity: float) -> None:
    """A rate 10 % off the capacity is judged wrongly once in a hundred times, one at it as often as not."""
    rng = random.Random(seed)

    def meets(rate: float, _: int) -> bool:
        return rng.random() < 1 / (1 + math.exp(46 * math.log(rate / capacity)))

    search = Search(Bounds(max_probes=120))
    drive(search, meets)
    assert search.phase is Phase.DONE
    assert search.low_rps is not None
    assert 0.8 < search.low_rps / capacity < 1.25


@pytest.mark.parametrize("factor", [0.6, 0.9, 1.1, 1.8])
def test_a_capacity_that_changes_under_way_is_found_as_it_is_at_the_end(factor: float) -> None:
    plain = Search(Bounds())
    before = len(drive(plain, lambda rate, _: rate <= 10))
    search = Search(Bounds(max_probes=80))
    drive(search, lambda rate, k: rate <= (10 if k < before - 4 else 10 * factor))
    assert search.phase is Phase.DONE
    assert search.reopened >= 1
    assert search.low_rps is not None
    assert search.high_rps is not None
    assert search.low_rps <= 10 * factor < search.high_rps


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.integers(3, 50))
def test_whatever_the_answers_it_ends_and_its_ends_are_in_order(answers: list[bool], limit: int) -> None:
    search = Search(Bounds(max_probes=limit))
    asked = drive(search, lambda _, k: answers[k])
    assert len(asked) <= limit
    assert all(0.01 <= rate <= 10000 for rate in asked)
    if search.low_rps is not None and search.high_rps is not None:
        assert search.low_rps < search.high_rps


@pytest.mark.parametrize(("meets", "end"), [(True, "max"), (False, "min")])
def test_a_capacity_outside_the_bounds_is_told(meets: bool, end: str) -> None:
    search = Search(Bounds(start_rps=3, min_rps=1, max_rps=20))
    asked = drive(search, lambda _rate, _k: meets)
    assert search.phase is Phase.OUTSIDE
    assert asked[-1] == (20 if end == "max" else 1)
    assert (search.low_rps is None) == (end == "min")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"start_rps": 0.001}, "--start-rate"),
        ({"min_rps": 0.0}, "--min-rate"),
        ({"precision": 0.0}, "--precision"),
        ({"repeats": 2}, "--repeats"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Bounds(**changes)  # type: ignore[arg-type]
