"""The overload benchmark: what it makes of outcomes, and that it runs to its JSON line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.bench.overload import Outcome, Shape, quantiles, report

SHAPE = Shape(input_tokens=8, output_tokens=4, ttft_ms=100, tpot_ms=20)


def outcome(tenant: str = "calm", status: int = 200, ttft_ms: float = 50, promised_ms: float = 0) -> Outcome:
    tokens = 4 if status == 200 else 0
    return Outcome(
        tenant=tenant, status=status, lag_ms=1, total_ms=10, ttft_ms=ttft_ms, tpot_ms=20, tokens=tokens,
        promised_ms=promised_ms,
    )  # fmt: skip


def test_served_in_time_refused_and_failed_add_up() -> None:
    outcomes = [
        *[outcome() for _ in range(6)],
        outcome(ttft_ms=101),
        outcome("flood", promised_ms=75),
        outcome("flood", 503),
        outcome("flood", 429),
        outcome("flood", 0),
    ]
    row = report(outcomes, SHAPE, per_s=5, seconds=2)
    assert (row["sent"], row["served"], row["refused"], row["failed"]) == (11, 8, 2, 1)
    assert row["goodput_per_s"] == 3.5
    assert row["served_in_time"] == 0.875
    assert row["tenants"]["flood"] == {"sent": 4, "served": 1, "good": 1, "share_of_good": 0.1429}
    assert row["tenants"]["calm"]["good"] == 6
    assert row["ttft_prediction_error"] == 0.5
    assert row["refusal_ms"]["max"] == 10


def test_without_targets_every_whole_answer_is_good_and_no_values_have_no_quantiles() -> None:
    assert outcome(ttft_ms=1e6).is_good(Shape(input_tokens=1, output_tokens=4))
    assert not outcome(status=503).is_good(Shape(input_tokens=1, output_tokens=4))
    assert quantiles([]) == {}
    assert quantiles(list(range(100))) == {"p50": 50, "p90": 90, "p99": 99, "max": 99}


@pytest.mark.slow
def test_it_runs_to_its_line() -> None:
    arguments = ["--seconds", "4", "--factors", "0.5,2", "--input-tokens", "64", "--output-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "services.bench.overload", *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["points"]) == {"0.5", "2"}
    for point in result["points"].values():
        assert point["failed"] == 0
        assert point["served"] > 0
