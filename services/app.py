"""ServeConfig → Ray Serve application: the one place that knows all services.

    serve run services.app:build model=default prefill=1 decode=1
    serve deploy deploy/serve/cpu-1p1d.yaml
    pdray serve                              (through `Cluster`, which also starts Ray)

`build` takes everything as text and returns the bound application. The secret travels in the deployments' arguments, is
generated where none is given. Serve itself logs the arguments of `build`: a secret, or a Redis with a password, belongs
into the environment of the cluster (PDRAY_SECRET, PDRAY_REDIS__URL) or into the file named by `config`.
"""
# No postponed annotations here: Serve reads the class of build's argument from its signature.

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from services.config import ROLES, ServeConfig, load, to_dict
from services.decode import deployment as decode_deployment
from services.prefill import deployment as prefill_deployment
from services.router import deployment as router_deployment
from services.start.secret import with_kept_secret
from services.start.shares import logical_cpus, usable_cores, with_threads
from services.store import deployment as store_deployment

APP_NAME = "pdray"
_log = logging.getLogger("pdray.app")
_STOP_MARGIN_S = 2.5  # beyond the drain, for workers to end their children
GRPC_SERVICES = (
    "services.protocol.proto.inference_pb2_grpc.add_InferenceServicer_to_server",
    "services.protocol.proto.open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
"""What Serve's gRPC proxy must be given as grpc_servicer_functions."""


class AppArgs(BaseModel):
    """Arguments of `build`. Short names for what one changes often; any other setting by its dotted name.

    A value may be text, as on the command line of `serve run`. Nested mappings, as in a YAML file, are settings too:
    ``engine: {block_size: 32}`` and ``engine.block_size: 32`` are the same.
    """

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)

    config: str | None = Field(None, description="YAML file with settings; arguments weigh more.")
    model: str | dict[str, Any] | None = Field(None, description="Folder, hub id, GGUF file, or `default`.")
    dtype: str | None = Field(None, description="auto, bfloat16 or float32.")
    max_model_len: int | None = None
    prefill: int | None = Field(None, description="Replicas of the prefill deployment; default 1.")
    decode: int | None = Field(None, description="Replicas of the decode deployment; default 1.")
    mixed: int | None = Field(None, description="Replicas of workers that take whole requests; default 0.")
    transport: str | None = Field(None, description="auto, mooncake, tcp or module:Class.")
    redis_url: str | None = Field(None, description="redis://…, `embedded` (one machine) or `none`.")
    namespace: str | None = None
    port: int | None = Field(None, description="The router's own HTTP port; default 0, a free one.")
    grpc_port: int | None = Field(None, description="The router's own gRPC port; default 0, a free one.")
    host: str | None = Field(None, description="Where router and workers listen; `node`: the node's address.")
    secret: str | None = Field(None, description="Better as PDRAY_SECRET: Serve logs arguments. Default: one is kept.")

    def overrides(self) -> dict[str, Any]:
        """The given settings by dotted name."""
        given = self.model_dump(exclude_none=True)
        given.pop("config", None)
        if host := given.pop("host", None):
            given |= {"router.host": host, "worker.host": host}
        return _flat({_SHORT.get(name, name): value for name, value in given.items()})


_SHORT = {
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "transport": "transfer.transport",
    "redis_url": "redis.url",
    "namespace": "redis.namespace",
    "port": "router.port",
    "grpc_port": "router.grpc_port",
}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    # `model` alone is its path, as a section it is a section
    return {("model.path" if name == "model" else name): value for name, value in flat.items()}


def config_from(args: AppArgs) -> ServeConfig:
    """The resolved configuration. Under Serve, ports of our own default to free ones, since Serve itself takes 8000.

    The threads of a worker are its share of this machine's cores unless given; a new share restarts the workers, so
    give ``engine.num_threads`` where counts will change.

    Raises ConfigError naming the setting.
    """
    config = load(args.config, args.overrides(), defaults={"router.port": 0, "router.grpc_port": 0})
    return with_threads(with_kept_secret(config), usable_cores())


def build(args: AppArgs) -> serve.Application:
    """The application for `serve run`, `serve build` and Serve's config files; each node prepares the model once."""
    return application(config_from(args))


def _replica_settings(config: ServeConfig) -> dict[str, Any]:
    """The configuration without the counts: those are options of the deployments, and scaling restarts no replica."""
    settings = to_dict(config)
    for role in ROLES:
        del settings[role]
    return settings


def application(config: ServeConfig, model_folder: Path | None = None) -> serve.Application:
    """Bind all deployments of one configuration.

    Args:
        config: with a secret. Where its redis.url is ``embedded`` the application starts a store of its own.
        model_folder: a prepared folder that every node can read; None: each node prepares the model.
    """
    config.check_pairs()
    if not config.secret:
        raise ValueError("the configuration has no secret; see services.start.secret")
    folder = "" if model_folder is None else str(model_folder)
    settings = _replica_settings(config)
    own_store = store_deployment.deployment().bind() if config.redis.url == "embedded" else None
    workers: list[serve.Application] = []
    if config.prefill:
        workers.append(prefill_deployment.deployment(config).bind(settings, folder, own_store))
    for role in ("decode", "mixed"):
        if getattr(config, role):
            workers.append(decode_deployment.deployment(config, role).bind(settings, folder, role, own_store))
    return router_deployment.deployment(config).bind(settings, folder, workers, own_store)


def router_only(config: ServeConfig, model_folder: Path) -> serve.Application:
    """The router alone, for workers that run elsewhere: it finds them by ``config.workers`` or its Redis."""
    return router_deployment.deployment(config).bind(_replica_settings(config), str(model_folder), [], None)


@dataclass(frozen=True, slots=True)
class AppState:
    """How far a deployed application is."""

    status: str  # Serve's word: DEPLOYING, RUNNING, DEPLOY_FAILED, …
    message: str
    waiting_for: tuple[str, ...]  # deployments that are not healthy yet

    @property
    def has_failed(self) -> bool:
        return self.status in ("DEPLOY_FAILED", "UNHEALTHY")


class Cluster:
    """A Ray cluster on this machine with one application on it, owned by the process that starts it.

    Its processes die with this one (Ray ties them to it), and `stop` ends them in order. Ray's own ports listen on all
    interfaces and ask for its token; Serve's HTTP proxy listens on the router's host.
    """

    OBJECT_STORE_BYTES = 100 << 20  # no tensor ever lies there

    def start(self, config: ServeConfig, *, dashboard: bool) -> None:
        """Start Ray and Serve's proxies; takes some seconds. The model's tensors never pass through Ray."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(
            address="local",
            num_cpus=logical_cpus(config, usable_cores()),
            object_store_memory=self.OBJECT_STORE_BYTES,
            include_dashboard=dashboard,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="serve",
            _temp_dir=config.log_dir or None,
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        router = config.router
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": router.host, "port": router.serve_port},
            grpc_options={"port": router.serve_grpc_port, "grpc_servicer_functions": list(GRPC_SERVICES)},
        )

    def deploy(self, app: serve.Application) -> None:
        """Hand the application to Serve; returns before it runs, see `state`."""
        target = serve.RunTarget(app, name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def state(self) -> AppState:
        app = serve.status().applications.get(APP_NAME)
        if app is None:
            return AppState("NOT_STARTED", "", ())
        waiting = tuple(name for name, d in app.deployments.items() if d.status != "HEALTHY")
        reasons = [f"{name}: {d.message}" for name, d in app.deployments.items() if d.message and name in waiting]
        return AppState(str(app.status.value), "\n".join([app.message, *reasons]).strip(), waiting)

    def router_ports(self) -> tuple[int, int]:
        """The router's own HTTP and gRPC port. Raises TimeoutError, or Ray's errors where it has died."""
        http, grpc = serve.get_app_handle(APP_NAME).ports.remote().result(timeout_s=10)
        return int(http), int(grpc)

    def router_readiness(self) -> tuple[str, list[dict[str, str]]]:
        """Why the router can serve no request now, empty where it can, and how its pairs move KV. Raises likewise."""
        reason, pairs = serve.get_app_handle(APP_NAME).readiness.remote().result(timeout_s=10)
        return str(reason), list(pairs)

    def logs(self) -> Path:
        """Folder of all logs of this run."""
        return Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]

    def stop(self, drain_s: float = 2.0) -> None:
        """Let streams end for at most ``drain_s``, then stop everything. Never raises for what is down already."""
        if not ray.is_initialized():
            return
        try:
            app = serve.status().applications.get(APP_NAME)
            for name in () if app is None else app.deployments:
                self._hasten(name, drain_s)
            serve.delete(APP_NAME, _blocking=False)
            deadline = time.monotonic() + drain_s + _STOP_MARGIN_S
            while APP_NAME in serve.status().applications and time.monotonic() < deadline:
                time.sleep(0.1)
        except (RayError, RayServeException, TimeoutError) as exc:
            _log.warning("Ray Serve did not stop in order: %s", exc)
        finally:
            ray.shutdown()

    def _hasten(self, deployment: str, drain_s: float) -> None:
        if deployment == store_deployment.NAME:
            return
        handle = serve.get_deployment_handle(deployment, APP_NAME)
        if not router_deployment.broadcast_blocking(handle, "hasten", drain_s, limit_s=1.0):
            _log.info("%s has no replica to drain", deployment)
