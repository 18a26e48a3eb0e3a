"""The token bucket against exact arithmetic: no more is begun than was filled, and nobody waits longer than told."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.access.limits import Bucket, Limits, Meter

STEPS = st.lists(st.tuples(st.integers(0, 120_000), st.integers(1, 50)), min_size=1, max_size=60)  # (ms, amount)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 200), steps=STEPS)
def test_the_level_is_that_of_exact_arithmetic(capacity: int, steps: list[tuple[int, int]]) -> None:
    bucket, level, now_ms = Bucket(capacity, 0.0), Fraction(capacity), 0
    for wait_ms, amount in steps:
        now_ms += wait_ms
        level = min(Fraction(capacity), level + Fraction(wait_ms * capacity, 60_000))
        assert abs(bucket.level(now_ms / 1000) - float(level)) < 1e-6
        bucket.take(amount, now_ms / 1000)
        level -= amount


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 200), steps=STEPS)
def test_no_window_begins_more_than_it_fills(capacity: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_s, taken = Bucket(capacity, 0.0), 0.0, []
    for wait_ms, wanted in steps:
        now_s += wait_ms / 1000
        amount = min(wanted, capacity)
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for i, (start_s, _) in enumerate(taken):
        total = 0
        for end_s, amount in taken[i:]:
            total += amount
            assert total <= capacity + (end_s - start_s) * capacity / 60 + 1e-6


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 200), steps=STEPS, amount=st.integers(1, 200))
def test_who_waits_as_told_is_served_and_a_little_earlier_is_not(
    capacity: int, steps: list[tuple[int, int]], amount: int
) -> None:
    bucket, now_s = Bucket(capacity, 0.0), 0.0
    for wait_ms, spent in steps:
        now_s += wait_ms / 1000
        bucket.take(spent, now_s)
    wait_s = bucket.wait_s(amount, now_s)
    assert bucket.wait_s(amount, now_s + wait_s + 1e-6) == 0
    if wait_s > 0.01:
        assert bucket.wait_s(amount, now_s + wait_s - 0.01) > 0


@settings(max_examples=40, deadline=None)
@given(ops=st.lists(st.integers(0, 3), max_size=60), concurrency=st.integers(1, 4))
def test_a_meter_counts_what_runs(ops: list[int], concurrency: int) -> None:
    meter, running = Meter("m", Limits(concurrency=concurrency), 0.0), 0
    for op in ops:
        if op and meter.refusal(0.0) is None:
            meter.running += 1
            running += 1
        elif not op and running:
            meter.running -= 1
            running -= 1
        assert meter.running == running <= concurrency
        assert (meter.refusal(0.0) is None) == (running < concurrency)


def test_a_clock_that_goes_back_gives_nothing_twice() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    bucket.take(0, 50.0)
    assert bucket.level(110.0) == 10
