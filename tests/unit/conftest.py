"""Fixtures that the tests of the fronts share. A file whose router differs has a `served` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from services.router.serve import Fronts
from tests.fronts import FakeCore, client_of, make_core, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeCore, Fronts]]:
    """One router for all tests of a file."""
    core = make_core(tmp_path_factory.mktemp("model"), model={"max_model_len": 2000}, max_model_len=2000)
    async with running(core) as fronts:
        yield core, fronts


@pytest.fixture
def core(served: tuple[FakeCore, Fronts]) -> FakeCore:
    served[0].forget()
    return served[0]


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: tuple[FakeCore, Fronts]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(served[1]) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
