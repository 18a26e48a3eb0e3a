"""One small application that several suites look at; none of them may harm it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.rig import Cluster


@pytest.fixture(scope="session")
def pd_cluster(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The default model in fp32, one prefill and one decode worker over the transport that `auto` takes."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"), default_model_folder)
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())


TINY_SHAPES: dict[str, dict[str, Any]] = {
    "apart": {"settings": {"transfer.transport": "tcp", "engine.max_num_batched_tokens": 40}},
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
}


@pytest.fixture(scope="session", params=TINY_SHAPES)
def tiny_cluster(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The tiny model in fp32, with prefill and decode apart and mixed."""
    cluster = Cluster(tmp_path_factory.mktemp(request.param), tiny_model_folder, **TINY_SHAPES[request.param])
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())
