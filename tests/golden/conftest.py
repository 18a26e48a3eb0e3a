"""The default model in float32, and what transformers says about it, made once for all golden tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.engine.loader import LoadedModel, load_model
from tests.golden.oracle import Expected, generate, license_prompts

QUICK = (1, 15, 16, 17, 33, 97, 200, 700)
NUM_TOKENS = 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than free cores make every operation wait for the slowest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(default_model_folder: Path) -> LoadedModel:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_model(default_model_folder, dtype="float32")
    torch.set_num_threads(before)
    return loaded


@pytest.fixture(scope="session")
def tiny(tiny_model_folder: Path) -> LoadedModel:
    """The tiny Llama, for what does not depend on the model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_model(tiny_model_folder, dtype="float32")
    torch.set_num_threads(before)
    return loaded


@pytest.fixture(scope="session")
def expected(default_model_folder: Path) -> dict[int, Expected]:
    """By prompt length."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = generate(default_model_folder, license_prompts(default_model_folder, QUICK), NUM_TOKENS)
    torch.set_num_threads(before)
    return {len(e.prompt): e for e in found}
