"""`serve deploy` of cpu-2p2d on a Ray cluster of two nodes, each in namespaces of its own, and the loss of either."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import charts
from tests.deploy.charts import Object, rendered
from tests.deploy.pods import Pod, running_pods, skip_unless_possible
from tests.deploy.test_serve_files import FOLDER
from tests.integration.serving import Stream, get, post

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(570)]
ROUTER, WORKER = '"pdray-router": 1', '"pdray-worker": 2'
COMMON = "--block --disable-usage-stats --object-store-memory=104857600 --num-cpus=2"


def until(what: str, holds: Callable[[], Any], limit_s: float) -> None:
    """Where the router does not answer, it does not hold."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.5)


def secret(name: str, key: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": key}}}


def node(start: str, *resources: str) -> Object:
    """A machine of the cluster: the head of cpu-2p2d.yaml says to start it so, and what to export before."""
    exports = {
        "HOME": "/var/lib/pdray",
        "PDRAY_HOME": "/var/lib/pdray",
        "PDRAY_REDIS__URL": "redis://:$(REDIS_PASSWORD)@r-pdray-valkey:6379/0",
        "RAY_AUTH_MODE": "token",
        "RAY_REDIS_ADDRESS": "r-pdray-valkey:6379",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    secrets = [
        secret("REDIS_PASSWORD", "valkey_password"),
        secret("RAY_AUTH_TOKEN", "auth_token"),
        secret("PDRAY_SECRET", "secret"),
    ]
    offered = f"--resources='{{{', '.join(resources)}}}'"
    env = [*secrets, *({"name": name, "value": value} for name, value in exports.items())]
    container = {"command": ["bash", "-c", f"exec ray start {start} {offered} {COMMON}"], "env": env}
    # as root, since some sandboxes let nobody else filter sockets, which guards Mooncake
    return {"containers": [container], "securityContext": {"runAsUser": 0}}


def configuration() -> str:
    """cpu-2p2d.yaml with a small model, no other wire than Mooncake's, and every pair in turn."""
    config = yaml.safe_load((FOLDER / "cpu-2p2d.yaml").read_text(encoding="utf-8"))
    (app,) = config["applications"]
    app["args"] |= {"model": "/models/tiny", "transport": "mooncake", "engine.num_blocks": 512}
    app["deployments"][0]["user_config"] = {"router": {"policy": "round-robin"}}
    return str(yaml.safe_dump(config))


class Rig:
    def __init__(self, pods: dict[str, Pod], router_on: str) -> None:
        self.pods = pods
        self.base = f"http://{pods[router_on].address}:8000"

    def serve(self, *arguments: str) -> str:
        container = self.pods["head"].spec["containers"][0]
        words = ["serve", *arguments, "--address", "http://127.0.0.1:8265"]
        done = subprocess.run(self.pods["head"].inside(container, words), capture_output=True, text=True, timeout=120)
        return done.stdout if done.returncode == 0 else f"failed: {done.stdout}{done.stderr}"

    def workers(self) -> dict[str, dict[str, Any]]:
        """Those that are ready, by id."""
        return {w["worker_id"]: w for w in get(f"{self.base}/v1/cluster")["workers"] if w["state"] == "ready"}

    def roles(self) -> list[str]:
        return sorted(w["role"] for w in self.workers().values())

    def place(self, worker: dict[str, Any]) -> str:
        return str(worker["address"]).rpartition(":")[0]

    def complete(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        answer = post(f"{self.base}/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 4
        return str(answer["id"])

    def hand_off(self, prompt: str) -> tuple[str, str, str]:
        """Where the prompt was computed, where the answer, and how the KV went there."""
        shown: dict[str, Any] = {}
        url = f"{self.base}/debug/requests/{self.complete(prompt)}"
        until("the hand-off is reported", lambda: shown.update(get(url)) or shown["handoff"], 10)
        workers = self.workers()
        return self.place(workers[shown["prefill"]]), self.place(workers[shown["decode"]]), shown["transport"]


@pytest.mark.parametrize("lost", ["worker", "head"])
def test_requests_cross_nodes_and_the_loss_of_one_is_survived(
    tmp_path: Path, tiny_model_folder: Path, lost: str
) -> None:
    skip_unless_possible()
    router_on = "head" if lost == "worker" else "worker"
    starts = {
        "head": '--head --port=6379 --redis-password="$REDIS_PASSWORD"',
        "worker": "--address=r-pdray-head:6379",
    }
    outcome = rendered({"mode": "plain"}, apis=())
    specs = [(role, spec) for role, _, spec in charts.pods(outcome.objects) if role == "valkey"]
    specs += [(n, node(start, *([ROUTER] if n == router_on else []), WORKER)) for n, start in starts.items()]
    for name in starts:
        model = tmp_path / name / "models" / "tiny"
        shutil.copytree(tiny_model_folder, model, copy_function=shutil.copyfile)
        model.chmod(0o755)
    with running_pods(specs, outcome, tmp_path) as pods:
        (tmp_path / "head" / "etc" / "pdray" / "serve.yaml").write_text(configuration())
        rig = Rig(pods, router_on)
        until("the cluster takes the file", lambda: "failed" not in rig.serve("deploy", "/etc/pdray/serve.yaml"), 120)
        both = ["decode", "decode", "prefill", "prefill"]
        until("two workers of each role serve", lambda: rig.roles() == both, 180)

        moves = {rig.hand_off(f"{n} and some more words") for n in range(8)}
        assert {transport for *_, transport in moves} == {"mooncake"}
        assert {(there, here) for there, here, _ in moves if there != here}, moves

        kept = {i: w["epoch"] for i, w in rig.workers().items() if rig.place(w) == pods[router_on].address}
        assert len(kept) == 2
        streams = [Stream(rig.base, max_tokens=400) for _ in range(6)]
        until("every stream has begun", lambda: all(stream.begun() for stream in streams), 60)
        pods[lost].stop()
        for stream in streams:
            stream.join(180)
        assert [stream.finish_reasons for stream in streams] == [["length"]] * 6
        until("what is left serves", lambda: set(rig.workers()) == set(kept), 60)
        rig.complete("still here")

        pods[lost].start()
        until("two workers of each role serve again", lambda: rig.roles() == both, 240)
        until("the application runs", lambda: "status: RUNNING" in rig.serve("status"), 120)
        assert {i: w["epoch"] for i, w in rig.workers().items() if i in kept} == kept, "nobody else had to start anew"
        rig.complete("all here")
