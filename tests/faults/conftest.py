"""One cluster for all tests of this folder; each of them leaves it idle and without faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.rig import Disturbed


@pytest.fixture(scope="package")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    disturbed = Disturbed.build(tmp_path_factory.mktemp("faulty"))
    asyncio.run(disturbed.cluster.start())
    yield disturbed
    disturbed.faults.set()
    asyncio.run(disturbed.cluster.stop())
