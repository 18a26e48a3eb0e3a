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


def test_the_cost_of_a_decision_is_reported_by_prompt_workers_and_blocks() -> None:
    result = run("decision_time", "--blocks", "20000", "--repeats", "3")
    assert not result["torch_loaded"]
    assert {(r["workers"], r["prompt_blocks"]) for r in result["rows"]} >= {(4, 10_000), (64, 100), (64, 10_000)}
    for row in result["rows"]:
        assert 0 < row["depth_ms"]["p50"] <= row["decision_ms"]["p50"] <= row["decision_ms"]["p99"]
    assert result["memory"]["bytes_per_block"] > 8


@pytest.mark.slow
def test_the_stores_failures_cost_no_request() -> None:
    result = run("index_outage", "--seconds", "3", "--per-s", "20")
    for name in ("whole", "flushed", "slow", "gone", "back"):
        assert (result[name]["failed"], result[name]["answered"]) == (0, 60), name
    assert result["back"]["whole_after_heartbeats"] is not None


@pytest.mark.slow
def test_the_cost_of_the_front_and_the_stalls_of_its_loop_are_reported() -> None:
    result = run("front_load", "--streams", "40", "--tokens", "10", "--idle", "10")
    assert result["idle"]["requests"] == 10
    assert 0 < result["idle"]["front_ms"]["p50"] <= result["idle"]["front_ms"]["p99"]
    assert result["load"]["whole"] == 40
    for phase in ("coming", "running"):
        assert result["load"][phase]["busy_ms"]["max"] > 0


@pytest.mark.slow
def test_the_time_of_another_tenants_prompts_is_reported() -> None:
    result = run("tenant_timing", "--rounds", "4", "--tokens", "256")
    assert {"others_ms", "nobodys_ms", "own_ms", "p_value", "p_value_of_own"} <= set(result)
