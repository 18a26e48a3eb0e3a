"""The parts of `pdray serve` that need no server: signals, readiness, the store, and the end of every process."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from kvstore.errors import ConfigError
from services.app import AppState
from services.config import ServeConfig, load
from services.launch import Signals, Stopped, _store, _wait_ready, end_all, last_line, moves_by, run
from services.present import example, url
from services.start.system import StartError


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of the test process are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_the_next_one_ends_everything_at_once(number: signal.Signals) -> None:
    Signals().install()
    with pytest.raises(Stopped):
        os.kill(os.getpid(), number)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), number)
    child.wait(10)  # its status is gone: whoever ended it has reaped it
    assert not psutil.pid_exists(child.pid)


def test_processes_that_end_by_themselves_are_waited_for_and_others_killed() -> None:
    quick = subprocess.Popen([sys.executable, "-c", "pass"])
    stubborn = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
    )
    end_all([psutil.Process(quick.pid), psutil.Process(stubborn.pid)], wait_s=1)
    for process in (quick, stubborn):
        process.wait(5)
        assert not psutil.pid_exists(process.pid)


class Starting:
    """A cluster whose router says in turn what it still waits for."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = list(reasons)

    def state(self) -> AppState:
        return AppState("RUNNING", "", ())

    def router_readiness(self) -> tuple[str, list[dict[str, str]]]:
        return self._reasons.pop(0), [{"transport": "tcp", "note": ""}]

    def router_ports(self) -> tuple[int, int]:
        return 1, 2


def test_a_router_that_is_not_ready_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.launch._POLL_S", 0.0)
    out = io.StringIO()
    waiting: Any = Starting("no decode worker is attached", "no decode worker is attached", "")
    ports, pairs = _wait_ready(waiting, Console(file=out, width=200))
    assert (ports, moves_by(pairs)) == ((1, 2), "tcp")
    assert out.getvalue().count("router: no decode worker is attached") == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d"),
        ({"tls.cert_file": "c", "tls.key_file": "k"}, "curl https://127.0.0.1:8000/"),
        ({"access.keys_file": "k"}, "-H 'Authorization: Bearer KEY'"),
    ],
)
def test_the_example_has_the_scheme_and_the_key_that_are_needed(settings: dict[str, str], told: str) -> None:
    assert told in example(load(overrides=settings, environ={}), 8000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback:\n  File x\nValueError: no such thing\n\n", "ValueError: no such thing"),
        ("one", "one"),
        ("", "no reason was given"),
    ],
)
def test_of_a_traceback_the_last_line_is_told(text: str, line: str) -> None:
    assert last_line(text) == line


def test_the_store_lives_as_long_as_its_block() -> None:
    with _store(ServeConfig()) as config:
        assert config.redis.is_embedded
        host, port = config.redis.url.rsplit("@", 1)[1].split("/")[0].split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize("address", ["none", "redis://there:6379/0"])
def test_no_store_is_started_where_one_is_given(address: str) -> None:
    given = load(overrides={"redis.url": address}, environ={})
    with _store(given) as config:
        assert config == given


@pytest.mark.usefixtures("handlers")
def test_a_model_that_does_not_exist_ends_the_start_with_its_name(tmp_path: Path) -> None:
    ports = dict.fromkeys(("router.port", "router.grpc_port", "router.serve_port", "router.serve_grpc_port"), 0)
    config = load(overrides={"model.path": str(tmp_path / "absent"), "redis.url": "none", **ports}, environ={})
    console = Console(file=io.StringIO())
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match="absent"):
        run(config, console, dashboard=False)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_transport_that_cannot_run_here_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.launch.check_system", _refuse)
    with pytest.raises(StartError, match="use tcp"):
        run(ServeConfig(), Console(file=io.StringIO()), dashboard=False)


def test_one_machine_has_one_router() -> None:
    config = load(overrides={"router.replicas": 2}, environ={})
    with pytest.raises(StartError, match=r"router\.replicas"):
        run(config, Console(file=io.StringIO()), dashboard=False)


def _refuse(_transport: str) -> None:
    raise StartError("mooncake is missing: use tcp")


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        ([], ""),
        ([("mooncake", ""), ("mooncake", "")], "mooncake"),
        (
            [("tcp", "tcp instead of rdma (--allow-fallback): no device")],
            "tcp instead of rdma (--allow-fallback): no device",
        ),
        (
            [("tcp", ""), ("", "transport differs: tcp on p0, rdma on d1")],
            "tcp, transport differs: tcp on p0, rdma on d1",
        ),
    ],
)
def test_the_banner_says_what_each_pair_moves_kv_by(pairs: list[tuple[str, str]], shown: str) -> None:
    """A pair that cannot exchange KV says why."""
    assert moves_by([{"transport": transport, "note": note} for transport, note in pairs]) == shown


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1:5"), ("0.0.0.0", "127.0.0.1:5"), ("::", "[::1]:5"), ("fd00::1", "[fd00::1]:5")],
)
def test_the_shown_address_is_one_that_a_client_can_use(host: str, shown: str) -> None:
    assert url("", host, 5) == shown


def test_the_example_is_one_line_that_a_shell_takes_whole() -> None:
    line = example(ServeConfig(), 8000)
    assert "\n" not in line
    assert shlex.split(line)[1] == "http://127.0.0.1:8000/v1/chat/completions"
