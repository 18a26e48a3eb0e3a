"""B − A with an interval: it holds the truth as often as it says, and warns of what makes it mean little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from services.bench.load.compare import block_resamples, compare, read_runs, welch
from services.bench.load.main import main


def run(mean_ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "completed": 10,
        "failed": 0,
        "valid": True,
        "request_throughput": 2.0,
        "output_throughput": 20.0,
        "request_goodput": None,
        "mean_ttft_ms": mean_ms,
        "num_prompts": 10,
        **changes,
    }


def with_rows(ttfts_ms: list[float], **changes: Any) -> dict[str, Any]:
    rows = [{"error": "", "ttft_ms": x, "tpot_ms": None, "e2el_ms": x + 100} for x in ttfts_ms]
    return run(float(np.mean(ttfts_ms)), requests=rows, **changes)


def test_welch_gives_the_textbook_interval() -> None:
    """Two samples with equal variances of 1 and 3 values each: 4 degrees of freedom, t = 2.776, s.e. = √(2/3)."""
    low, high = welch(np.array([1.0, 2.0, 3.0]), np.array([11.0, 12.0, 13.0]))
    assert (low, high) == pytest.approx((10 - 2.776 * (2 / 3) ** 0.5, 10 + 2.776 * (2 / 3) ** 0.5), abs=1e-3)


def test_equal_runs_have_an_interval_without_width() -> None:
    assert welch(np.array([5.0] * 3), np.array([7.0] * 3)) == (2.0, 2.0)


def test_the_interval_over_runs_holds_the_truth_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        low, high = welch(rng.normal(10, 1, 4), rng.normal(11, 3, 4))
        held += low <= 1.0 <= high
    assert 0.94 <= held / 2000 <= 0.985  # degrees of freedom are rounded down: rather too wide


def test_blocks_keep_neighbours_together() -> None:
    rows = block_resamples(np.arange(100.0), np.random.default_rng(0), resamples=50)
    assert rows.shape == (50, 100)
    steps = np.diff(rows.reshape(50, 10, 10), axis=2) % 100
    assert set(steps.ravel()) == {1.0}


def test_blocks_widen_the_interval_of_requests_that_queue_together() -> None:
    slow = np.repeat(np.random.default_rng(1).normal(100, 10, 10), 40)  # neighbours are alike
    spread = block_resamples(slow, np.random.default_rng(2)).mean(axis=1).std()
    single = np.random.default_rng(2).choice(slow, size=(4000, len(slow))).mean(axis=1).std()
    assert spread > 2.5 * single


def test_runs_are_compared_where_there_are_three() -> None:
    found = compare([run(x) for x in (100, 101, 102)], [run(x) for x in (120, 121, 122)])
    assert found.method == "runs"
    row = next(d for d in found.differences if d.metric == "mean_ttft_ms")
    assert (row.a, row.b, row.verdict) == (101, 121, "higher")
    assert found.warnings == []


@pytest.mark.parametrize(("shift_ms", "verdict"), [(40, "higher"), (-40, "lower"), (0, "no difference seen")])
def test_one_run_each_is_compared_by_its_requests(shift_ms: float, verdict: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (with_rows(list(rng.normal(500 + s, 20, 200))) for s in (0, shift_ms))
    found = compare([a], [b], seed=1)
    assert found.method == "requests"
    rows = {d.metric: d for d in found.differences}
    assert rows["mean_ttft_ms"].verdict == rows["mean_e2el_ms"].verdict == verdict
    assert "mean_tpot_ms" not in rows
    assert rows["request_throughput"].verdict == "unknown"
    assert any("one run each" in w for w in found.warnings)


def test_failures_are_no_latencies() -> None:
    a, b = with_rows([10.0] * 20), with_rows([10.0] * 20)
    b["requests"].append({"error": "closed", "ttft_ms": 99999.0, "tpot_ms": None, "e2el_ms": None})
    b["requests"].append({"error": "", "is_cancelled": True, "ttft_ms": 99999.0, "tpot_ms": None, "e2el_ms": None})
    rows = {d.metric: d for d in compare([a], [b]).differences}
    assert rows["mean_ttft_ms"].b == 10


def test_what_makes_a_comparison_doubtful_is_said() -> None:
    a = [run(x, warm_cache=True) for x in (1, 2, 3)]
    b = [run(x, num_prompts=20, valid=False, failed=2) for x in (1, 2, 3)]
    words = " | ".join(compare(a, b).warnings)
    for part in ("num_prompts differs: 10 in A, 20 in B", "3 runs of B are invalid", "6 requests of B", "3 runs of A"):
        assert part in words


def test_too_little_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="--save-detailed"):
        compare([run(1)] * 2, [run(1)] * 3)


def test_the_command_ends_in_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, base in (("a", 100), ("b", 130)):
        (tmp_path / name).write_text("\n".join(["a table", *(json.dumps(run(base + k)) for k in range(3))]))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["differences"]["mean_ttft_ms"]["verdict"] == "higher"
    assert last["method"] == "runs"


def test_a_file_without_results_is_an_error_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("nothing\n{broken\n{}\n")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 1
    assert "holds no result" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="missing"):
        read_runs(tmp_path / "missing")
