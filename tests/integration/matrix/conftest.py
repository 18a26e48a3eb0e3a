"""The lab that all cells share, and the option that writes what it found into the docs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.prepare import prepare
from tests.conftest import make_tiny_llama
from tests.integration.matrix.lab import Lab
from tests.integration.matrix.table import PAGE, page


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-fault-matrix", action="store_true", help=f"write what the cells found to {PAGE.name}")


@pytest.fixture(scope="session")
def long_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with room for prompts that take a while."""
    folder = tmp_path_factory.mktemp("tiny-long")
    make_tiny_llama(folder, max_position_embeddings=8192)
    cache = tmp_path_factory.mktemp("prepared-long")
    return prepare(str(folder), cache_dir=cache, dtype="auto", progress=lambda _: None)


@pytest.fixture(scope="session")
def lab(long_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Lab]:
    lab = Lab(long_tiny_model, tmp_path_factory.mktemp)
    yield lab
    lab.close()
    if pytestconfig.getoption("--write-fault-matrix", default=False):
        PAGE.write_text(page(lab.results), encoding="utf-8")
