"""A cluster over the fault-injecting transport, and what its answers must be.

Its workers have forty blocks and keep nothing, so that each prompt is computed and transferred, and whoever comes
next gets the blocks of whoever just left.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.engine.prepare import prepare
from services.protocol.client import AsyncPdrayClient, CallOptions
from services.protocol.errors import RequestError
from tests import prompts
from tests.conftest import make_tiny_llama
from tests.faults.control import Faults
from tests.integration.rig import Cluster

NUM_LAYERS = 4
VOCABULARY = range(3, 512)


def four_layers(folder: Path) -> Path:
    """A prepared tiny Llama of four layers, so that first, last and inner layers are different ones."""
    source = folder / "tiny-four"
    source.mkdir()
    make_tiny_llama(source, num_hidden_layers=NUM_LAYERS)
    return prepare(str(source), cache_dir=folder / "prepared", dtype="auto", progress=lambda _: None)


@dataclass
class Disturbed:
    """Workers whose transfers obey `faults`."""

    cluster: Cluster
    faults: Faults
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    last_error: str = ""  # message of the last failed request

    @classmethod
    def build(cls, folder: Path, inner: str = "Tcp", **options: Any) -> Disturbed:
        faults = Faults(folder, NUM_LAYERS)
        settings = {
            "transfer.transport": f"tests.faults.transport:Faulty{inner}",
            "transfer.device": str(faults.path),
            "transfer.lease_ms": 2000,
            "transfer.lease_renew_ms": 500,
            "transfer.fence_after_ms": 100,
            "engine.num_blocks": 40,
            "engine.prefix_cache": "off",
            "engine.max_num_batched_tokens": 64,
            **options.pop("settings", {}),
        }
        cluster = Cluster(folder, four_layers(folder), settings=settings, **options)
        cluster.check_decode_computes_nothing = False  # it may, as the last rung of the ladder
        return cls(cluster, faults)

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    def expected(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What plain transformers answers, end tokens ignored."""
        return list(prompts.greedy(self.cluster.model, tuple(prompt), max_tokens))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncPdrayClient]:
        async with AsyncPdrayClient(f"127.0.0.1:{self.cluster.grpc_port}") as client:
            yield client

    async def ask(self, client: AsyncPdrayClient, prompt: list[int], max_tokens: int, timeout_s: float = 60.0) -> str:
        """Empty where the answer is the expected one; else the error code. Fails on any other answer."""
        got: list[int] = []
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
        try:
            async for piece in client.generate(prompt, options=CallOptions(timeout_s=timeout_s), **sampling):
                got += piece.token_ids
        except RequestError as exc:
            outcome, self.last_error = str(exc.code), exc.message
        else:
            outcome = ""
        expected = self.expected(prompt, max_tokens)
        assert got == (expected[: len(got)] if outcome else expected), (outcome, prompt)
        return outcome

    def failures(self) -> Counter[str]:
        """pdray_worker_transfer_failures_total by kind, over all workers."""
        text = httpx.get(f"{self.cluster.url}/metrics", timeout=5).text
        found: Counter[str] = Counter()
        for kind, value in re.findall(r'^pdray_worker_transfer_failures_total\{kind="(\w+)".*\} (\S+)$', text, re.M):
            found[kind] += int(float(value))
        return found

    async def assert_right_afterwards(self, timeout_s: float = 10.0) -> None:
        """No block is lost, and the next request is right."""
        self.faults.set()
        self.cluster.check(await self.cluster.idle(timeout_s))
        async with self.client() as client:
            assert await self.ask(client, self.prompt(100), 6) == "", self.last_error
