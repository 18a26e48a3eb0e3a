"""The decode workers as Ray Serve deployments: a thin shell around `services.decode.worker`.

``decode`` continues what prefill workers hand off; ``mixed`` takes whole requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray.util
from ray import serve

from services.config import ServeConfig
from services.decode.worker import build
from services.start.replica import WorkerReplica, replica_config, worker_options
from services.start.shares import WORKER_CPUS
from services.telemetry.logs import setup_logging


class DecodeWorker(WorkerReplica):
    """One decode or mixed worker. ``model_folder`` is empty where each node prepares the model itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], model_folder: str, role: str, store: Any = None
    ) -> None:
        setup_logging()
        config = await replica_config(settings, store, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        worker_id = f"{role}-{serve.get_replica_context().replica_id.unique_id}"
        await self.begin(config, model_folder, partial(build, role=role, worker_id=worker_id))

    async def __del__(self) -> None:
        await self.close()


def deployment(config: ServeConfig, role: str) -> serve.Deployment:
    """The deployment for role ``decode`` or ``mixed``, named like it, with this configuration's number of replicas."""
    replicas = config.mixed if role == "mixed" else config.decode
    return serve.deployment(name=role, num_replicas=replicas, **worker_options(config, WORKER_CPUS))(DecodeWorker)
