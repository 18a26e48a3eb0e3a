"""`pdray bench sweep`, `report` and `scenario` as a user runs them: processes of their own, real time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.errors import ConfigError
from services.bench.scenarios.runner import bench_process
from services.bench.scenarios.servers import serving
from tests.integration.test_bench_tool import fake_process

PDRAY = [sys.executable, "-m", "services.cli", "bench"]
SMALL = ["--random-input-len", "20", "--random-output-len", "2"]


def command(*arguments: str, limit_s: float = 280) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The last line of its output, parsed."""
    done = subprocess.run([*PDRAY, *arguments], capture_output=True, text=True, timeout=limit_s)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.mark.slow
def test_a_sweep_of_a_server_with_a_known_capacity(tmp_path: Path) -> None:
    """Four at once for 200 ms each are 20 a second. Far from it on both sides no machine is in doubt."""
    with fake_process("--ttft-ms", "190", "--itl-ms", "10", "--slots", "4") as url:
        found, done = command(
            "sweep", "--base-url", url, *SMALL, "--burstiness", "inf", "--goodput", "ttft:600", "--probe-s", "4",
            "--precision", "0.2", "--repeats", "1", "--start-rate", "4", "--max-client-lag-ms", "500",
            "--save-result", "--result-dir", str(tmp_path), "--result-filename", "sweep.json", "--label", "fake",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["valid"]
    assert 14 < found["max_request_rate"] < 24
    assert found["max_request_rate"] < found["lowest_failing_rate"] < 30
    assert "of the requests keep ttft" in done.stdout
    assert done.stderr.count("requests/s") == found["num_probes"]
    assert json.loads((tmp_path / "sweep.json").read_text()) == found


def test_a_sweep_without_an_slo_is_refused() -> None:
    done = subprocess.run([*PDRAY, "sweep"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--goodput" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(560)
def test_a_scenario_starts_measures_and_leaves_nothing_behind(tmp_path: Path, tiny_model_folder: Path) -> None:
    file, lines, page = tmp_path / "mine.yaml", tmp_path / "r.jsonl", tmp_path / "page.md"
    file.write_text(
        "{title: T, claim: Two answer as one does., baseline: one, candidate: two,"
        " settings: {prefill: 0, decode: 0, engine.num_blocks: 64, transfer.transport: tcp, model.dtype: float32},"
        " sides: {one: {mixed: 1}, two: {mixed: 2}},"
        " cases: [{name: c, requests: 12, load: {random-input-len: 16, random-output-len: 4, max-concurrency: 2},"
        " expect: [{metric: mean_ttft_ms, be: not_higher}]}]}"
    )
    arguments = ["scenario", str(file), "--form", "tiny", "--set", f"model.path={tiny_model_folder}"]
    found, done = command(*arguments, "--output", str(lines), "--page", str(page), limit_s=540)
    assert done.returncode == 0, done.stderr
    assert [run["side"] for run in found["runs"]] == ["one", "two"]
    assert all(run["result"]["completed"] == 3 and run["result"]["valid"] for run in found["runs"]), found["runs"]
    assert found["findings"][0]["baseline"] > 0
    assert json.loads(lines.read_text()) == found
    assert "pdray serve --set prefill=0" in page.read_text()
    mine = str(tiny_model_folder)
    left = [p.pid for p in psutil.process_iter() if mine in " ".join(_words(p)) and "serve" in _words(p)]
    assert left == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_server_that_cannot_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    words = r"pdray serve --set prefil=1` ended with code 1:\n(.|\n)*prefil is not"
    with pytest.raises(ConfigError, match=words), serving([{"prefil": 1}], tmp_path):
        raise AssertionError("it is up")


def test_a_load_that_cannot_be_run_is_an_error_with_its_command() -> None:
    words = "pdray bench --base-url http://127.0.0.1:9 --ready-check-timeout-sec 0"
    with pytest.raises(ConfigError, match=re.escape(words)):
        bench_process("http://127.0.0.1:9", ["--ready-check-timeout-sec", "0"])
