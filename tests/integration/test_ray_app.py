"""The application under plain Ray Serve, as `serve run`, `serve deploy` and `serve status` handle it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.config import home
from services.engine.prepare import prepare
from services.protocol.proto import inference_pb2, inference_pb2_grpc
from services.start.ports import free_port
from tests.integration.serving import Command, Stream, get, post, running, shared_memory, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SERVE = str(Path(sys.executable).with_name("serve"))
PROMPT = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


class ServeApp:
    """A running `serve run FILE`, and the file, which `serve deploy` may be given again."""

    def __init__(self, command: Command, file: Path, settings: dict[str, Any]) -> None:
        self.command = command
        self.file = file
        self.settings = settings
        self.proxy = f"http://127.0.0.1:{settings['http_options']['port']}"
        self.grpc_proxy = f"127.0.0.1:{settings['grpc_options']['port']}"
        self.dashboard = ""

    @property
    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = self.settings["applications"][0]["args"]
        return args

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.args['port']}"

    def scale(self, **counts: int) -> None:
        replicas = [{"name": name, "num_replicas": count} for name, count in counts.items()]
        self.settings["applications"][0]["deployments"] = replicas
        self.write()

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.settings), encoding="utf-8")

    def serve(self, *arguments: str) -> str:
        """Output of one `serve …` command against this cluster."""
        command = [SERVE, *arguments, "--address", self.dashboard]
        env = {**os.environ, "RAY_AUTH_MODE": "token"}  # a cluster made by ray.init asks for its token
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        app: dict[str, Any] = yaml.safe_load(self.serve("status"))["applications"]["pdray"]
        return app

    def workers(self, role: str, state: str = "ready") -> list[dict[str, Any]]:
        return [w for w in get(f"{self.base}/v1/cluster")["workers"] if (w["role"], w["state"]) == (role, state)]


@pytest.fixture
def serve_app(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServeApp]:
    """The shipped configuration on free ports, with the arguments a test asks for by `indirect` parameters."""
    settings = yaml.safe_load((ROOT / "deploy" / "serve" / "cpu-1p1d.yaml").read_text(encoding="utf-8"))
    settings["http_options"]["port"], settings["grpc_options"]["port"] = free_port(), free_port()
    args = {"transport": "tcp", "dtype": "float32", "num_blocks": None, "port": free_port(), "grpc_port": free_port()}
    settings["applications"][0]["args"] |= {k: v for k, v in {**args, **request.param}.items() if v is not None}
    if settings["applications"][0]["args"]["model"] == "tiny":
        settings["applications"][0]["args"]["model"] = str(request.getfixturevalue("tiny_model_folder"))
    else:
        prepare("default", cache_dir=home() / "models", dtype="float32", progress=lambda _: None)
    del settings["applications"][0]["deployments"]  # the counts of the arguments hold
    file = tmp_path / "serve.yaml"
    memory = shared_memory()
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    env = {"PDRAY_HOME": str(tmp_path / "home"), "PDRAY_MODEL__CACHE_DIR": str(home() / "models")}
    with running([SERVE, "run", str(file)], env) as command:
        app = ServeApp(command, file, settings)
        app.dashboard = command.wait_for(r"dashboard at\D*(http://[\d.:]+)").group(1)
        until("the router is ready", lambda: is_ready(app.base), limit_s=240)
        until("the application runs", lambda: app.status()["status"] == "RUNNING", period_s=1)
        yield app
        app.command.send(signal.SIGINT)
        app.command.wait(90)
        command.expect_gone(30)
    assert shared_memory() <= memory


def is_ready(base: str) -> bool:
    try:
        get(f"{base}/ready")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("serve_app", [{"prefill": 1, "decode": 1}], indirect=True)
def test_the_shipped_configuration_serves_on_every_port_and_stops(serve_app: ServeApp) -> None:
    status = serve_app.status()
    assert set(status["deployments"]) == {"router", "store", "prefill", "decode"}
    assert {d["status"] for d in status["deployments"].values()} == {"HEALTHY"}

    direct = post(f"{serve_app.base}/v1/completions", PROMPT)
    assert "Paris" in direct["choices"][0]["text"]
    through_serve = post(f"{serve_app.proxy}/v1/completions", PROMPT)
    assert through_serve["choices"][0]["text"] == direct["choices"][0]["text"]

    cluster = get(f"{serve_app.base}/v1/cluster")
    assert cluster["redis"]["mode"] == "embedded"
    assert [(w["role"], w["prompt_tokens_computed"]) for w in cluster["workers"] if w["role"] == "decode"] == [
        ("decode", 0)
    ]
    for worker in cluster["workers"]:
        assert "services.engine.child" in " ".join(psutil.Process(worker["pid"]).cmdline())

    for address in (serve_app.grpc_proxy, f"127.0.0.1:{serve_app.args['grpc_port']}"):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            inference = inference_pb2_grpc.InferenceStub(channel)
            sampling = inference_pb2.SamplingParams(max_tokens=8, temperature=0)
            ask = inference_pb2.GenerateRequest(prompt=str(PROMPT["prompt"]), sampling=sampling)
            text = "".join(part.text for part in inference.Generate(ask, timeout=60))
            assert text == direct["choices"][0]["text"]

    stream = Stream(serve_app.proxy, max_tokens=30)
    stream.join()
    assert stream.finish_reasons == ["length"]
    assert stream.has_ended_properly


@pytest.mark.slow
@pytest.mark.parametrize("serve_app", [{"model": "tiny", "prefill": 1, "decode": 3}], indirect=True)
def test_scaling_in_cuts_no_stream(serve_app: ServeApp) -> None:
    until("three decode workers", lambda: len(serve_app.workers("decode")) == 3)
    streams = [Stream(serve_app.base, max_tokens=900) for _ in range(30)]
    until("every stream has begun", lambda: all(stream.begun() for stream in streams))
    serve_app.scale(decode=1)
    serve_app.serve("deploy", str(serve_app.file))
    until("one decode worker", lambda: len(serve_app.workers("decode")) == 1, limit_s=180)
    for stream in streams:
        stream.join(180)
    assert [stream.finish_reasons for stream in streams] == [["length"]] * 30
    assert all(stream.has_ended_properly for stream in streams)


@pytest.mark.slow
@pytest.mark.parametrize("serve_app", [{"model": "tiny", "prefill": 1, "decode": n} for n in (1, 3)], indirect=True)
def test_a_redeploy_lets_running_streams_end_and_serves_on_the_same_ports(serve_app: ServeApp) -> None:
    before = {w["worker_id"] for role in ("prefill", "decode") for w in serve_app.workers(role)}
    streams = [Stream(serve_app.base, max_tokens=900) for _ in range(30)]
    until("every stream has begun", lambda: all(stream.begun() for stream in streams))
    serve_app.args["engine.max_num_batched_tokens"] = 256
    serve_app.write()
    serve_app.serve("deploy", str(serve_app.file))
    for stream in streams:
        stream.join(180)
    assert [stream.finish_reasons for stream in streams] == [["length"]] * 30

    def renewed() -> bool:
        try:
            now = {w["worker_id"] for role in ("prefill", "decode") for w in serve_app.workers(role)}
        except OSError:
            return False
        return len(now) == len(before) and not now & before

    until("new workers are ready at the same address", renewed, limit_s=180)
    assert re.search(r"\w", post(f"{serve_app.base}/v1/completions", PROMPT)["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("serve_app", [{"model": "tiny", "prefill": 1, "decode": 1}], indirect=True)
def test_an_upgrade_and_its_rollback_cut_no_stream(serve_app: ServeApp) -> None:
    def ids() -> set[str]:
        try:
            return {w["worker_id"] for role in ("prefill", "decode") for w in serve_app.workers(role)}
        except OSError:
            return set()

    streams: list[Stream] = []
    name, built = "engine.max_num_batched_tokens", dict(serve_app.args)
    for change in ({name: 256}, {}):  # the upgrade, and back
        old = ids()
        streams += (now := [Stream(serve_app.base, max_tokens=900) for _ in range(20)])
        until("every stream has begun", lambda now=now: all(stream.begun() for stream in now))
        serve_app.settings["applications"][0]["args"] = built | change
        serve_app.write()
        serve_app.serve("deploy", str(serve_app.file))
        until("both workers are new ones", lambda old=old: len(ids()) == 2 and not ids() & old, limit_s=180)
        until("the application runs", lambda: serve_app.status()["status"] == "RUNNING", limit_s=120, period_s=1)
    for stream in streams:
        stream.join(180)
    assert [stream.finish_reasons for stream in streams] == [["length"]] * 40
    assert all(stream.has_ended_properly for stream in streams)


@pytest.mark.slow
@pytest.mark.parametrize("serve_app", [{"model": "tiny", "prefill": 1, "decode": 1}], indirect=True)
def test_live_settings_count_without_a_restart_and_a_bad_one_ends_nothing(serve_app: ServeApp) -> None:
    def deploy(**live: Any) -> None:
        router = {"name": "router", "user_config": live} if live else {"name": "router"}
        serve_app.settings["applications"][0]["deployments"] = [router]
        serve_app.write()
        serve_app.serve("deploy", str(serve_app.file))

    def shown() -> dict[str, Any]:
        settings: dict[str, Any] = get(f"{serve_app.base}/v1/cluster")["settings"]
        return settings

    epochs = {w["epoch"] for w in get(f"{serve_app.base}/v1/cluster")["workers"]}
    stream = Stream(serve_app.base, max_tokens=900)
    until("the stream has begun", stream.begun)
    deploy(slo={"ttft_ms": 60_000}, limits={"prompts": 1})
    until("the router has them", lambda: shown()["reloaded"] == {"slo.ttft_ms": 60_000, "limits.prompts": 1})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(f"{serve_app.base}/v1/completions", PROMPT | {"prompt": ["a", "b"]})
    deploy(limits={"prompt": 1})
    until("the mistake is shown", lambda: shown()["refused"].startswith("limits.prompt cannot"))
    assert shown()["reloaded"] == {"slo.ttft_ms": 60_000, "limits.prompts": 1}
    deploy()
    until("all is as it was built", lambda: shown() == {"reloaded": {}, "refused": ""})
    assert len(post(f"{serve_app.base}/v1/completions", PROMPT | {"prompt": ["a", "b"]})["choices"]) == 2
    stream.join(180)
    assert stream.finish_reasons == ["length"]
    assert {w["epoch"] for w in get(f"{serve_app.base}/v1/cluster")["workers"]} == epochs
    assert serve_app.status()["status"] == "RUNNING"
