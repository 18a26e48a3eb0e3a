"""What a start decides before anything runs: system, ports, secret, shares; and a worker's life inside a replica."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.config import RouterConfig, ServeConfig, TransferConfig, load, to_dict
from services.start.model import announcement, prepare_model, result_line, run_prepare
from services.start.ports import check_ports, free_port, port_map, why_not, with_serve_ports
from services.start.replica import STOP_MARGIN_S, WorkerReplica, WorkerUnhealthy, replica_config, worker_options
from services.start.secret import with_kept_secret, with_new_secret
from services.start.shares import logical_cpus, num_workers, with_threads
from services.start.system import MOONCAKE_LIBRARIES, StartError, System, check_system, refusal, this_system

GOOD = System(os_name="Linux", python=(3, 11), machine="x86_64", missing_libraries=(), has_mooncake=True)


class TestSystem:
    def test_a_complete_linux_is_accepted_with_every_transport(self) -> None:
        assert [refusal(GOOD, name) for name in ("auto", "tcp", "mooncake", "rdma", "mine:Transport")] == [""] * 5

    @pytest.mark.parametrize(
        ("change", "transport", "words"),
        [
            ({"os_name": "Darwin"}, "auto", ("Linux", "Darwin", "container")),
            ({"os_name": "Windows"}, "tcp", ("Linux", "Windows", "container")),
            ({"python": (3, 10)}, "auto", ("3.11 or 3.12", "3.10")),
            ({"python": (3, 13)}, "auto", ("3.11 or 3.12", "3.13", "container")),
            ({"has_mooncake": False}, "mooncake", ("pdray[mooncake]", "--transport tcp")),
            ({"no_rdma": "no port of mlx5_0 is active"}, "rdma", ("mlx5_0", "--transport tcp", "--allow-fallback")),
            ({}, "nvlink", ("host memory", "--transport tcp")),
            ({"has_mooncake": False}, "rdma", ("transport rdma needs mooncake", "pdray[mooncake]")),
            (
                {"missing_libraries": ("libnuma.so.1",)},
                "mooncake",
                ("libnuma.so.1", "apt-get install", "--transport tcp"),
            ),
        ],
    )
    def test_a_refusal_names_the_cause_and_the_way_out(
        self, change: dict[str, Any], transport: str, words: tuple[str, ...]
    ) -> None:
        reason = refusal(dataclasses.replace(GOOD, **change), transport)
        assert all(word in reason for word in words), reason

    @pytest.mark.parametrize("transport", ["auto", "tcp"])
    def test_without_mooncake_the_other_transports_still_start(self, transport: str) -> None:
        bare = dataclasses.replace(GOOD, missing_libraries=tuple(MOONCAKE_LIBRARIES), has_mooncake=False)
        assert refusal(bare, transport) == ""

    def test_this_machine_may_run_the_tests(self) -> None:
        check_system(TransferConfig(transport="tcp"))
        check_system(TransferConfig(transport="rdma", device="no_such_device", allow_fallback=True))
        with pytest.raises(StartError, match=r"transport rdma cannot be used: .*--allow-fallback"):
            check_system(TransferConfig(transport="rdma", device="no_such_device"))
        assert this_system().python == sys.version_info[:2]


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


def with_ports(port: int, grpc_port: int, serve_port: int, serve_grpc_port: int) -> ServeConfig:
    router = RouterConfig(port=port, grpc_port=grpc_port, serve_port=serve_port, serve_grpc_port=serve_grpc_port)
    return ServeConfig(router=router)


class TestPorts:
    @pytest.mark.parametrize(
        ("place", "option"),
        [(0, "--port"), (1, "--grpc-port"), (2, "router.serve_port"), (3, "router.serve_grpc_port")],
    )
    def test_a_taken_port_is_named_with_the_option_that_moves_it(self, listener: int, place: int, option: str) -> None:
        numbers = [free_port(), free_port(), free_port(), free_port()]
        numbers[place] = listener
        with pytest.raises(StartError, match=rf"port {listener} .*{option}"):
            check_ports(with_ports(*numbers))

    def test_free_ports_and_zeros_pass_and_stay_free(self) -> None:
        config = with_ports(free_port(), 0, free_port(), 0)
        check_ports(config)
        check_ports(config)
        assert why_not("127.0.0.1", config.router.port) == ""

    def test_one_port_for_two_purposes_is_refused(self) -> None:
        port = free_port()
        with pytest.raises(StartError, match=rf"{port} is given to both --port and --grpc-port"):
            check_ports(with_ports(port, port, 0, 0))

    def test_every_clash_is_told_at_once(self, listener: int) -> None:
        port = free_port()
        with pytest.raises(StartError) as error:
            check_ports(with_ports(listener, port, port, 0))
        assert len(str(error.value).splitlines()) == 2

    def test_a_just_closed_server_is_no_clash(self) -> None:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()  # this side closes first and keeps the TIME_WAIT
        assert why_not("127.0.0.1", port) == ""

    def test_serve_gets_free_ports_where_it_is_given_none(self) -> None:
        config = with_serve_ports(with_ports(0, 0, 0, 0))
        assert config.router.port == 0
        assert len({config.router.serve_port, config.router.serve_grpc_port, 0}) == 3
        assert with_serve_ports(with_ports(1, 2, 3, 4)) == with_ports(1, 2, 3, 4)

    def test_every_port_setting_of_the_router_is_on_the_map(self) -> None:
        config = with_ports(11, 12, 13, 14)
        assert [port.number for port in port_map(config)] == [11, 12, 13, 14]


class TestSecret:
    def test_a_given_secret_stays(self, tmp_path: Path) -> None:
        config = ServeConfig(secret="mine")
        assert with_new_secret(config) == with_kept_secret(config, tmp_path) == config
        assert not list(tmp_path.iterdir())

    def test_each_run_gets_another_secret(self) -> None:
        secrets = {with_new_secret(ServeConfig()).secret for _ in range(20)}
        assert len(secrets) == 20
        assert min(map(len, secrets)) >= 32

    def test_builds_racing_for_one_namespace_agree_on_one_secret(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: with_kept_secret(ServeConfig(), tmp_path).secret, range(64)))
        assert len(found) == 1
        files = list(tmp_path.iterdir())
        assert [file.name for file in files] == ["secret-default"]
        assert files[0].stat().st_mode & 0o077 == 0

    def test_namespaces_have_secrets_of_their_own(self, tmp_path: Path) -> None:
        configs = [load(overrides={"redis.namespace": name}, environ={}) for name in ("a", "b/c")]
        assert len({with_kept_secret(config, tmp_path).secret for config in configs}) == 2

    def test_a_file_cut_short_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "secret-default").write_text("", encoding="ascii")
        assert len(with_kept_secret(ServeConfig(), tmp_path).secret) >= 32


class TestShares:
    @settings(deadline=None)
    @given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(1, 64))
    def test_threads_are_shared_and_never_oversubscribed_while_there_are_cores(
        self, prefill: int, decode: int, mixed: int, num_cores: int
    ) -> None:
        config = with_threads(ServeConfig(prefill=prefill, decode=decode, mixed=mixed), num_cores)
        threads, workers = config.engine.num_threads, num_workers(config)
        assert threads >= 1
        if 0 < workers <= num_cores:
            assert threads * workers <= num_cores < (threads + 1) * workers

    def test_a_given_number_of_threads_stays(self) -> None:
        config = load(overrides={"engine.num_threads": 7}, environ={})
        assert with_threads(config, 2) == config

    @settings(deadline=None)
    @given(st.integers(0, 40), st.integers(1, 8))
    def test_every_replica_finds_its_cpus_on_a_cluster_of_our_own(self, workers: int, num_cores: int) -> None:
        config = ServeConfig(prefill=workers, decode=workers)
        claimed = 2 * workers * 0.2 + 0.1 + 0.05
        assert logical_cpus(config, num_cores) >= max(claimed, num_cores)

    def test_one_pair_fits_on_two_cores(self) -> None:
        assert logical_cpus(ServeConfig(), 2) == 2


class TestModel:
    def test_progress_is_passed_on_and_the_folder_is_the_last_line(self, tmp_path: Path) -> None:
        script = f"print('unpacking'); print(); print({result_line(tmp_path)!r})"
        lines: list[str] = []
        assert run_prepare([sys.executable, "-c", script], lines.append) == tmp_path
        assert lines == ["unpacking"]

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("print('loading'); print('model.path: x is no model'); raise SystemExit(1)", "x is no model"),
            ("raise SystemExit(3)", "status 3"),
            ("print('folder: /x'); raise SystemExit(1)", "folder: /x"),
            ("print('done')", "done"),
        ],
    )
    def test_a_failure_ends_with_its_own_reason(self, script: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            run_prepare([sys.executable, "-c", script], lambda _line: None)

    def test_an_interrupted_wait_leaves_no_process(self) -> None:
        pids: list[int] = []

        def interrupt(line: str) -> None:
            pids.append(int(line))
            raise KeyboardInterrupt

        script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        with pytest.raises(KeyboardInterrupt):
            run_prepare([sys.executable, "-c", script], interrupt)
        assert subprocess.run(["kill", "-0", str(pids[0])], capture_output=True).returncode != 0

    def test_a_model_that_does_not_exist_is_refused_with_its_name(self, tmp_path: Path) -> None:
        config = load(overrides={"model.path": str(tmp_path / "absent"), "model.cache_dir": str(tmp_path)}, environ={})
        with pytest.raises(ConfigError, match="absent"):
            prepare_model(config, lambda _line: None)

    def test_a_first_start_says_what_it_costs(self, tmp_path: Path) -> None:
        default = load(overrides={"model.cache_dir": str(tmp_path)}, environ={}).model
        assert "270 MB" in announcement(default)
        hub = load(overrides={"model.path": "some/model"}, environ={}).model
        assert "hub" in announcement(hub)
        folder = load(overrides={"model.path": str(tmp_path)}, environ={}).model
        assert announcement(folder) == ""


class FakeRuntime:
    """Records what a replica does with its worker."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.reason = ""
        self._fails = fails

    address = "127.0.0.1:5"

    async def start(self) -> None:
        self.calls.append("start")
        if self._fails:
            raise OSError("no memory")

    async def drain(self, limit_s: float) -> bool:
        self.calls.append(f"drain {limit_s:g}")
        return True

    async def stop(self) -> None:
        self.calls.append("stop")

    def healthy(self) -> str:
        return self.reason

    def autoscaling_stats(self) -> dict[str, float]:
        return {"queued": 3.0}


async def started(runtime: FakeRuntime, drain_s: float = 60) -> WorkerReplica:
    replica = WorkerReplica()
    config = load(overrides={"worker.drain_s": drain_s}, environ={})
    await replica.begin(config, "/model", lambda _config, _folder: runtime)
    return replica


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDRAY_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own_home")
class TestReplica:
    async def test_a_file_says_that_it_serves_until_it_drains(self, own_home: Path) -> None:
        runtime = FakeRuntime()
        replica = await started(runtime)
        marker = own_home / "run" / f"serving-{os.getpid()}"
        assert marker.exists()
        seen = []

        async def drain(_limit_s: float) -> bool:
            seen.append(marker.exists())
            return True

        runtime.drain = drain  # type: ignore[method-assign]
        await replica.close()
        assert seen == [False]

    async def test_a_replica_drains_before_it_stops_and_does_so_once(self) -> None:
        runtime = FakeRuntime()
        replica = await started(runtime)
        await asyncio.gather(replica.close(), replica.close())
        assert runtime.calls == ["start", "drain 60", "stop"]

    async def test_a_hastened_replica_drains_for_the_shorter_time_only(self) -> None:
        runtime = FakeRuntime()
        replica = await started(runtime)
        await replica.hasten(3)
        await replica.hasten(100)
        await replica.close()
        assert runtime.calls == ["start", "drain 3", "stop"]

    async def test_a_failed_start_stops_what_it_started_and_tells_why(self) -> None:
        runtime = FakeRuntime(fails=True)
        replica = WorkerReplica()
        with pytest.raises(OSError, match="no memory"):
            await replica.begin(ServeConfig(), "/model", lambda _config, _folder: runtime)
        await replica.close()
        assert runtime.calls == ["start", "stop"]
        assert await replica.address() == ""

    async def test_health_passes_on_the_workers_own_reason(self) -> None:
        runtime = FakeRuntime()
        replica = await started(runtime)
        await replica.check_health()
        runtime.reason = "the engine process ended"
        with pytest.raises(WorkerUnhealthy, match="the engine process ended"):
            await replica.check_health()
        assert await replica.record_autoscaling_stats() == {"queued": 3.0}

    def test_serve_waits_longer_than_the_drain(self) -> None:
        config = load(overrides={"worker.drain_s": 90}, environ={})
        assert worker_options(config, 0.2)["graceful_shutdown_timeout_s"] >= 90 + STOP_MARGIN_S


class FakeStore:
    """A handle whose `url.remote()` answers, or never does."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    @property
    def url(self) -> FakeStore:
        return self

    async def remote(self) -> str:
        if not self._answers:
            await asyncio.Event().wait()
        return "redis://127.0.0.1:1/0"


class TestReplicaConfig:
    async def test_the_nodes_address_takes_the_place_of_its_name(self) -> None:
        settings = to_dict(load(overrides={"router.host": "node", "worker.host": "node"}, environ={}))
        config = await replica_config(settings, None, "10.0.0.7")
        assert (config.router.host, config.worker.host) == ("10.0.0.7", "10.0.0.7")

    async def test_the_embedded_store_gives_its_address(self) -> None:
        config = await replica_config(to_dict(ServeConfig()), FakeStore(answers=True), "")
        assert config.redis.url == "redis://127.0.0.1:1/0"
        assert config.redis.is_embedded

    async def test_a_store_that_never_answers_does_not_stop_a_replica(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.start.replica.STORE_WAIT_S", 0.01)
        config = await replica_config(to_dict(ServeConfig()), FakeStore(answers=False), "")
        assert config.redis.url == "none"

    async def test_a_given_redis_is_left_as_it_is(self) -> None:
        settings = to_dict(load(overrides={"redis.url": "redis://there:6379/0"}, environ={}))
        config = await replica_config(settings, None, "")
        assert config.redis.url == "redis://there:6379/0"
        assert not config.redis.is_embedded
