"""How an application divides one machine among its workers."""

from __future__ import annotations

import dataclasses
import os

from services.config import ServeConfig

WORKER_CPUS = 0.2
"""Ray CPUs a worker claims. Small, so that one prefill and one decode fit beside the router on two cores; the engine's
real share is engine.num_threads."""
ROUTER_CPUS = 0.1
STORE_CPUS = 0.05


def num_workers(config: ServeConfig) -> int:
    return config.prefill + config.decode + config.mixed


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def with_threads(config: ServeConfig, num_cores: int) -> ServeConfig:
    """Resolve engine.num_threads 0 into an equal share of ``num_cores`` for each worker, at least 1.

    Counts all workers as if on one machine; on a cluster give engine.num_threads instead.
    """
    if config.engine.num_threads:
        return config
    share = max(1, num_cores // max(1, num_workers(config)))
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, num_threads=share))


def logical_cpus(config: ServeConfig, num_cores: int) -> int:
    """Ray CPUs for a cluster of our own: the machine's, or more where the replicas claim more."""
    claimed = num_workers(config) * WORKER_CPUS + config.router.replicas * ROUTER_CPUS + STORE_CPUS
    return max(num_cores, int(claimed) + 1)
