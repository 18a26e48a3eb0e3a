"""One small application that several suites look at; none of them may harm it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rig import Cluster


@pytest.fixture(scope="session")
def pd_cluster(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The default model in fp32, one prefill and one decode worker over the transport that `auto` takes."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"), default_model_folder)
    asyncio.run(cluster.start())
    yield cluster
    asyncio.run(cluster.stop())
