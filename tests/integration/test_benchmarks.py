"""The benchmarks run, end in one JSON line, and prove what they are for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from services.engine_config import POLICIES


def run(name: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"services.bench.{name}", *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_the_reader_sees_layer_0_of_the_last_chunk_before_its_last_layer_is_computed() -> None:
    result = run("hand_off", "--tokens", "800", "--rounds", "1")
    proof = "reader_saw_layer_0_before_last_layer_was_computed_ms"
    assert result["layer_by_layer"][proof] > 0
    assert result["chunk_by_chunk"][proof] <= 0


@pytest.mark.slow
def test_the_cost_of_a_streamed_token_is_reported_for_the_own_port() -> None:
    result = run("stream_cost", "--tokens", "20", "--streams", "1,4", "--skip-serve")
    for row in result["direct"].values():
        assert {"worker_cpu_us", "router_cpu_us", "gap_p50_ms", "gap_p99_ms", "added_p99_ms"} == set(row)


def test_the_cost_of_planning_a_step_is_reported_for_each_policy() -> None:
    result = run("step_planning", "--running", "4", "--waiting", "20", "--steps", "10")
    for policy in POLICIES:
        for row in result[policy].values():
            assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p99_ms"]
            assert row["running"] <= 16
