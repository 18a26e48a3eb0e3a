"""The benchmark of the hand-off runs and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_benchmark_ends_in_one_line_with_both_modes() -> None:
    arguments = ["--transport", "tcp", "--tokens", "100", "--chunk-tokens", "48", "--layer-ms", "0.1", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "services.bench.transfer_overlap", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["bytes"] == 7 * 30 * 12288
    for mode in ("layer_by_layer", "chunk_by_chunk"):
        assert result[mode]["total_ms_p50"] >= result[mode]["exposed_ms_p50"] >= 0
