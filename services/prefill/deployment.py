"""The prefill workers as a Ray Serve deployment: a thin shell around `services.prefill.worker`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray.util
from ray import serve

from services.config import ServeConfig
from services.prefill.worker import build
from services.start.replica import WorkerReplica, replica_config, worker_options
from services.start.shares import WORKER_CPUS
from services.telemetry.logs import setup_logging

NAME = "prefill"


class PrefillWorker(WorkerReplica):
    """One prefill worker. ``model_folder`` is empty where each node prepares the model itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], model_folder: str, store: Any = None
    ) -> None:
        setup_logging()
        config = await replica_config(settings, store, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        worker_id = f"{NAME}-{serve.get_replica_context().replica_id.unique_id}"
        await self.begin(config, model_folder, partial(build, role="prefill", worker_id=worker_id))

    async def __del__(self) -> None:
        await self.close()


def deployment(config: ServeConfig) -> serve.Deployment:
    """The deployment with this configuration's number of replicas."""
    options = worker_options(config, WORKER_CPUS)
    return serve.deployment(name=NAME, num_replicas=config.prefill, **options)(PrefillWorker)
