"""The Serve application: what its arguments mean, what it binds, and what each deployment is allowed."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray.exceptions import RayActorError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from kvstore.errors import ConfigError
from services.app import GRPC_SERVICES, AppArgs, application, build, config_from
from services.config import ServeConfig, from_dict, load
from services.router.deployment import Ingress, WorkerAddresses, broadcast, is_loopback

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of these builds lie in a folder of the test's own."""
    monkeypatch.setenv("PDRAY_HOME", str(tmp_path))


def arguments(**given: Any) -> ServeConfig:
    return config_from(AppArgs.model_validate(given))


def bound(app: serve.Application) -> dict[str, Any]:
    """Deployments of an application by name."""
    built = build_app(app, name="pdray", default_runtime_env={})
    return {deployment.name: deployment for deployment in built.deployments}


class TestArguments:
    def test_everything_may_be_text_as_serve_run_passes_it(self) -> None:
        config = arguments(
            model="x/y", prefill="2", decode="3", mixed="1", dtype="float32", transport="tcp", port="8123"
        )
        assert (config.model.path, config.prefill, config.decode, config.mixed) == ("x/y", 2, 3, 1)
        assert (config.model.dtype, config.transfer.transport, config.router.port) == ("float32", "tcp", 8123)

    def test_any_setting_is_taken_by_dotted_name_or_as_a_section(self) -> None:
        dotted = arguments(**{"engine.block_size": "32", "model.path": "m", "router.policy": "least-loaded"})
        nested = arguments(engine={"block_size": 32}, model={"path": "m"}, router={"policy": "least-loaded"})
        assert dotted == nested
        assert dotted.engine.block_size == 32

    @pytest.mark.parametrize(
        "given", [{"blocksize": 3}, {"engine.blocksize": 3}, {"engine": {"blocksize": 3}}, {"dtype": "int3"}]
    )
    def test_an_unknown_or_impossible_argument_is_refused_by_name(self, given: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"blocksize|dtype"):
            arguments(**given)

    def test_own_ports_default_to_free_ones_unless_any_source_names_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (arguments().router.port, arguments().router.grpc_port) == (0, 0)
        file = tmp_path / "pdray.yaml"
        file.write_text("router: {port: 8100}\n", encoding="utf-8")
        monkeypatch.setenv("PDRAY_ROUTER__GRPC_PORT", "9100")
        router = arguments(config=str(file)).router
        assert (router.port, router.grpc_port) == (8100, 9100)

    def test_host_moves_router_and_workers(self) -> None:
        config = arguments(host="node")
        assert (config.router.host, config.worker.host) == ("node", "node")

    def test_building_again_keeps_the_secret_so_that_old_and_new_replicas_understand_each_other(self) -> None:
        assert arguments().secret == arguments(decode="2").secret != ""
        assert arguments(namespace="other").secret != arguments().secret
        assert arguments(secret="given").secret == "given"

    def test_threads_are_resolved(self) -> None:
        assert arguments().engine.num_threads >= 1


class TestApplication:
    def test_serve_calls_build_with_validated_arguments(self) -> None:
        assert inspect.signature(build).parameters["args"].annotation is AppArgs
        app = call_user_app_builder_with_args_if_necessary(build, {"prefill": "1", "decode": "2"})
        assert bound(app)["decode"].num_replicas == 2

    @pytest.mark.parametrize(
        ("counts", "names"),
        [
            ({"prefill": 1, "decode": 2}, {"router", "store", "prefill", "decode"}),
            ({"prefill": 0, "decode": 0, "mixed": 3}, {"router", "store", "mixed"}),
            ({"prefill": 1, "decode": 1, "mixed": 1, "redis_url": "none"}, {"router", "prefill", "decode", "mixed"}),
        ],
    )
    def test_each_role_that_has_replicas_is_a_deployment(self, counts: dict[str, Any], names: set[str]) -> None:
        deployments = bound(build(AppArgs.model_validate(counts)))
        assert set(deployments) == names
        for role in ("prefill", "decode", "mixed"):
            assert role not in names or deployments[role].num_replicas == counts[role]

    def test_the_router_is_the_ingress(self) -> None:
        built = build_app(build(AppArgs()), name="pdray", default_runtime_env={})
        assert built.ingress_deployment_name == "router"

    def test_serve_lets_every_deployment_drain_and_replaces_a_sick_one_within_seconds(self) -> None:
        deployments = bound(build(AppArgs.model_validate({"worker.drain_s": 45})))
        for name in ("router", "prefill", "decode"):
            config = deployments[name]._deployment_config
            assert config.graceful_shutdown_timeout_s > 45
            assert config.health_check_period_s <= 5
            assert config.max_ongoing_requests >= 1000
            assert config.max_constructor_retry_count <= 3

    def test_one_pair_claims_less_than_two_cores(self) -> None:
        deployments = bound(build(AppArgs()))
        assert sum(d.ray_actor_options["num_cpus"] for d in deployments.values()) < 1.0

    def test_counts_that_serve_nothing_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="serves nothing"):
            build(AppArgs.model_validate({"prefill": 0}))

    def test_without_a_secret_nothing_is_bound(self) -> None:
        with pytest.raises(ValueError, match="secret"):
            application(ServeConfig())

    def test_replicas_get_the_whole_configuration_as_plain_data(self) -> None:
        config = load(overrides={"secret": "s", "engine.block_size": 8}, environ={})
        settings = bound(application(config, Path("/model")))["prefill"].init_args[0]
        assert from_dict(settings) == config

    def test_scaling_changes_no_argument_of_any_replica(self) -> None:
        def arguments_of(**counts: int) -> dict[str, Any]:
            args = AppArgs.model_validate({"engine.num_threads": 1, **counts})
            return {name: str(d.init_args) for name, d in bound(build(args)).items()}

        assert arguments_of(prefill=1, decode=3) == arguments_of(prefill=2, decode=1)

    def test_fixed_own_ports_allow_one_router_for_each_node(self) -> None:
        fixed = bound(build(AppArgs.model_validate({"router.replicas": 2, "port": 8000})))["router"]
        assert fixed._replica_config.max_replicas_per_node == 1
        free = bound(build(AppArgs.model_validate({"router.replicas": 2})))["router"]
        assert free._replica_config.max_replicas_per_node is None


class TestFiles:
    @pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "serve").glob("*.yaml")), ids=lambda f: f.name)
    def test_a_shipped_configuration_is_valid_and_builds(self, file: Path) -> None:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        assert tuple(schema.grpc_options.grpc_servicer_functions) == GRPC_SERVICES
        (app,) = schema.applications
        assert app.import_path == "services.app:build"
        config = arguments(**app.args)
        ports = {config.router.port, config.router.grpc_port, schema.http_options.port, schema.grpc_options.port}
        assert ports == {8000, 8001, 9000, 9001}
        assert bound(build(AppArgs.model_validate(app.args)))


class Replica:
    """A handle of a deployment whose replicas answer as told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked = 0

    def broadcast(self, method: str) -> Replica:
        assert method == "address"
        self.asked += 1
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        if self.answers and isinstance(self.answers[0], TimeoutError):
            raise self.answers[0]
        return list(self.answers)


class OldReplica:
    """A handle of a Ray without broadcast: each call reaches one replica."""

    class _Method:
        async def remote(self) -> str:
            return "10.0.0.1:7"

    address = _Method()


class TestDiscovery:
    async def test_addresses_come_from_every_replica_that_answers(self) -> None:
        handle: Any = Replica("10.0.0.1:7", RayActorError(), "", "10.0.0.2:7")
        assert await WorkerAddresses(handle)() == ["10.0.0.1:7", "10.0.0.2:7"]

    async def test_ray_is_asked_rarely_once_workers_are_known(self) -> None:
        times = iter([100.0, 100.0, 100.5, 101.9, 102.0, 102.0, 102.5])
        handle: Any = Replica("10.0.0.1:7")
        source = WorkerAddresses(handle, lambda: next(times))
        answers = [await source() for _ in range(5)]
        assert answers == [["10.0.0.1:7"]] * 5
        assert handle.asked == 2

    async def test_the_last_addresses_stay_while_nobody_answers(self) -> None:
        now = 100.0
        handle: Any = Replica("10.0.0.1:7")
        source = WorkerAddresses(handle, lambda: now)
        await source()
        now, handle.answers = 200.0, (TimeoutError(),)
        assert await source() == ["10.0.0.1:7"]

    async def test_without_broadcast_one_replica_is_asked(self) -> None:
        handle: Any = OldReplica()
        assert await broadcast(handle, "address") == ["10.0.0.1:7"]


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("unix:/tmp/x", True),
        ("ipv4:10.0.0.1:50000", False),
        ("ipv6:[::ffff:10.0.0.1]:50000", False),
        ("ipv6:[fe80::1]:50000", False),
        ("ipv4:12.127.0.1:50000", False),
        ("", False),
    ],
)
def test_a_peer_is_local_only_on_loopback(peer: str, local: bool) -> None:
    assert is_loopback(peer) is local


async def test_the_ingress_answers_serves_lifespan_by_itself() -> None:
    messages = asyncio.Queue[dict[str, str]]()
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    for kind in ("lifespan.startup", "lifespan.shutdown"):
        messages.put_nowait({"type": kind})
    await asyncio.wait_for(Ingress()({"type": "lifespan"}, messages.get, send), 5)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
