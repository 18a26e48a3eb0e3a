"""`pdray serve` as a user runs it: it starts, answers, stops on a signal, and leaves nothing behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from services.start.ports import why_not
from tests.integration.serving import Command, Stream, get, post, running, shared_memory, until

pytestmark = pytest.mark.ray
PORTS = ["--port", "0", "--grpc-port", "0", "--set", "router.serve_port=0", "--set", "router.serve_grpc_port=0"]


def serve(model: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "services.cli", "serve", "--model", str(model), "--dtype", "float32"]
    return [*command, "--transport", "tcp", *([] if "--num-blocks" in more else ["--num-blocks", "64"]), *PORTS, *more]


def base_of(command: Command) -> str:
    return command.wait_for(r"OpenAI API, chat page +(http://[\d.:]+)").group(1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("num_streams", "num_blocks"), [(4, 64), pytest.param(20, 1400, marks=pytest.mark.slow)], ids=["4", "20"]
)
def test_a_server_answers_and_a_signal_ends_it_with_all_that_it_started(
    tiny_model_folder: Path, num_streams: int, num_blocks: int
) -> None:
    memory = shared_memory()
    with running(serve(tiny_model_folder, "--num-blocks", str(num_blocks))) as command:
        base = base_of(command)
        ports = [int(part) for part in command.wait_for(r":(\d+), gRPC (\d+)").groups()] + [int(base.rsplit(":", 1)[1])]
        command.wait_for("curl http")
        answer = post(f"{base}/v1/completions", {"prompt": "one two", "max_tokens": 4, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 4
        cluster = get(f"{base}/v1/cluster")
        assert sorted((w["role"], w["state"]) for w in cluster["workers"]) == [
            ("decode", "ready"),
            ("prefill", "ready"),
        ]
        assert cluster["redis"]["mode"] == "embedded"
        started = {process.name() for process in command.descendants()}
        assert any("valkey" in name for name in started)
        streams = [Stream(base, max_tokens=900) for _ in range(num_streams)]
        until("every stream has begun", lambda: all(stream.begun() for stream in streams))

        command.send(signal.SIGTERM)

        assert command.wait() == 0, command.output
        for stream in streams:
            stream.join(10)
        assert all(stream.has_ended_properly for stream in streams), [stream.events[-1:] for stream in streams]
        command.expect_gone(5)
        assert [why_not("127.0.0.1", port) for port in ports] == [""] * 3
    assert shared_memory() <= memory


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_application_that_cannot_start_ends_with_the_workers_own_reason(tiny_model_folder: Path) -> None:
    with running(serve(tiny_model_folder, "--transport", "no.such.module:Transport")) as command:
        assert command.wait(300) == 1
        assert "the application did not start" in command.output
        assert "no.such.module" in command.output
        command.expect_gone(5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_everything_dies_with_a_command_that_is_killed(tiny_model_folder: Path) -> None:
    memory = shared_memory()
    with running(serve(tiny_model_folder)) as command:
        command.wait_for("Ctrl-C stops everything")
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        for ours in ("services.", "kvstore.", "valkey", "ray::Serve"):
            command.expect_gone(30, ours)
        command.expect_gone(120)  # Ray's agents try to reach the dead head for a minute
    assert shared_memory() <= memory


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_that_hangs_is_replaced_and_service_goes_on(tiny_model_folder: Path) -> None:
    with running(serve(tiny_model_folder, "--set", "worker.stall_s=2", "--set", "worker.drain_s=2")) as command:
        base = base_of(command)
        before = {w["worker_id"]: w for w in get(f"{base}/v1/cluster")["workers"] if w["role"] == "decode"}
        (hung,) = before.values()
        psutil.Process(hung["pid"]).suspend()

        def replaced() -> bool:
            workers = [w for w in get(f"{base}/v1/cluster")["workers"] if w["role"] == "decode"]
            return any(w["worker_id"] not in before and w["state"] == "ready" for w in workers)

        until("another decode worker is ready", replaced, limit_s=120)
        answer = post(f"{base}/v1/completions", {"prompt": "one two", "max_tokens": 4, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 4
        assert not psutil.pid_exists(hung["pid"])
        command.send(signal.SIGINT)
        assert command.wait() == 0
        command.expect_gone(5)
