"""The pods of mode plain, run here as they are rendered: they find each other, serve, pass their probes and drain."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import charts
from tests.deploy.charts import rendered
from tests.deploy.pods import running_pods, skip_unless_possible

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
VALUES = {
    "mode": "plain",
    "weights": {"source": "pvc"},
    "model": {"path": "/models/default"},
    "drainSeconds": 60,
    "engineThreads": 1,
    "settings": {"engine": {"num_blocks": 512, "max_num_seqs": 8}},
}
ROLES = ("valkey", "head", "router", "prefill", "decode")


def until(what: str, holds: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.5)


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return dict(json.load(response))


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=120)


def test_pods_serve_as_rendered_and_a_stopped_one_lets_its_stream_end(
    tmp_path: Path, default_model_folder: Path
) -> None:
    skip_unless_possible()
    for role in ROLES:  # the weights' volume
        folder = tmp_path / role / "models" / "default"
        shutil.copytree(default_model_folder, folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)  # prepared folders are their owner's only
    outcome = rendered(VALUES, apis=())
    by_role = {role: spec for role, _, spec in charts.pods(outcome.objects)}
    with running_pods([(role, by_role[role]) for role in ROLES], outcome, tmp_path) as pods:

        def ready(role: str) -> bool:
            assert all(pod.lives() for pod in pods.values())
            return pods[role].probe("readinessProbe")

        until("the head is healthy", lambda: ready("head"), 120)
        assert not pods["router"].probe("readinessProbe")
        assert not pods["decode"].probe("readinessProbe")
        pods["head"].start_sidecars()
        until("the router is ready", lambda: ready("router"), 150)
        for pod in pods.values():
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert pod.probe(name), f"{pod.role}: {name}"

        base = f"http://{pods['router'].address}:8000"
        prompt = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
        with post(f"{base}/v1/completions", prompt) as response:
            assert "Paris" in json.load(response)["choices"][0]["text"]
        cluster = get(f"{base}/v1/cluster")
        places = {worker["role"]: worker["address"].rpartition(":")[0] for worker in cluster["workers"]}
        assert places == {role: pods[role].address for role in ("prefill", "decode")}
        assert cluster["redis"]["mode"] not in ("none", "embedded")

        stream = post(f"{base}/v1/completions", prompt | {"max_tokens": 300, "stream": True, "ignore_eos": True})
        with stream:
            assert b"data:" in stream.readline()
            hook = pods["decode"].pre_stop()
            text = stream.read().decode()
        assert text.rstrip().endswith("data: [DONE]")
        assert "error" not in text
        assert text.count('"text"') > 20
        output, _ = hook.communicate(timeout=120)
        assert hook.returncode == 0, output
        assert not pods["decode"].probe("livenessProbe"), "Ray has ended the drained node"
