"""One or two pairs of real workers that the cells of the matrix harm and heal, each worker in a network of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.integration.matrix.network import Network
from tests.integration.rig import Cluster

LEASE_S = 2.0
FIRST_TOKEN_S = 30.0
TOTAL_S = 60.0
CHUNK_TOKENS = 8
WIRE_BYTES_PER_S = 160_000
PREFILL_BLOCKS = 290
DECODE_BLOCKS = 1600
ENGINE = "services.engine.child"


def settings(pairs: int) -> dict[str, Any]:
    """Short leases, a slow wire, small steps and a small pool at the prefill worker: each phase lasts long enough."""
    return {
        "transfer.transport": "tcp",
        "transfer.lease_ms": int(LEASE_S * 1000),
        "transfer.lease_renew_ms": 500,
        "transfer.throttle_bytes_per_s": WIRE_BYTES_PER_S,
        "engine.max_num_batched_tokens": CHUNK_TOKENS,
        "admission.held_steps": 0,  # prompts wait at their worker, not at the router
        "budget.first_token_s": FIRST_TOKEN_S,
        "budget.idle_s": FIRST_TOKEN_S,
        "budget.total_s": TOTAL_S,
        "router.policy": "round-robin" if pairs > 1 else "cost",  # a request's pair is known before it is sent
    }


@dataclass
class World:
    """`open`, harm and heal as often as wanted, `close`."""

    folder: Path
    model: Path
    pairs: int
    has_network: bool
    cluster: Cluster = field(init=False)
    network: Network | None = field(init=False, default=None)
    used_turns: int = 0  # requests that went to some pair, as far as this side counts

    def __post_init__(self) -> None:
        names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(self.pairs)]
        blocks = {"prefill": PREFILL_BLOCKS, "decode": DECODE_BLOCKS}
        self.cluster = Cluster(
            self.folder,
            self.model,
            prefill=self.pairs,
            decode=self.pairs,
            settings=settings(self.pairs),
            worker_settings={n: {"engine.num_blocks": blocks[n.split("-")[0]]} for n in names},
        )
        if self.has_network:
            self.network = Network(f"m{os.getpid() % 10000}", names)
            self.cluster.hosts = {n: self.network.host(n) for n in names}
            self.cluster.wrappers = {n: self.network.wrapper(n) for n in names}

    async def open(self) -> World:
        if self.network is not None:
            self.network.open()
        try:
            await self.cluster.start()
        except BaseException:
            self._close_network()
            raise
        return self

    async def close(self) -> None:
        """Ends everything, whatever state it is in; checks the invariants where the router still answers."""
        for name in list(self.cluster.processes):
            with suppress(psutil.NoSuchProcess):
                self.thaw(name)
        try:
            await self.cluster.stop()
        finally:
            self._close_network()

    def _close_network(self) -> None:
        if self.network is not None:
            self.network.close()

    # --- harm ---

    def freeze(self, name: str) -> None:
        """The service process and its children stand still, as in a machine that stops."""
        _signal(self._family(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        _signal(self._family(name), signal.SIGCONT)

    def pin(self, name: str) -> None:
        """Only the engine stands still: nothing is computed, everything else goes on."""
        _signal(self._engine(name), signal.SIGSTOP)

    def unpin(self, name: str) -> None:
        _signal(self._engine(name), signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Returns when no process of the worker is left."""
        family = self._family(name)
        self.cluster.kill(name)
        self.cluster.processes[name].wait(10)
        _, alive = psutil.wait_procs(family, 10)
        assert not alive, f"children outlived {name}: {alive}"

    def cut(self, name: str) -> None:
        assert self.network is not None
        self.network.cut(name)

    def mend(self, name: str) -> None:
        assert self.network is not None
        self.network.mend(name)

    # --- heal ---

    async def heal(self) -> None:
        """Start again what has ended, and wait until every worker is ready."""
        for name in self.cluster.addresses:
            if self.cluster.processes[name].poll() is not None:
                self.cluster.start_worker(name)
        await self.cluster.ready(60)

    async def is_whole(self) -> bool:
        """Whether all workers are ready and idle."""
        try:
            rows = await self.cluster.idle(1.0)
        except Exception:
            return False
        return {w["worker_id"] for w in rows} == set(self.cluster.addresses)

    async def state(self, name: str) -> str:
        return str((await self.cluster.worker(name))["state"])

    async def until_state(self, name: str, states: set[str], timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            if await self.state(name) in states:
                return True
            await asyncio.sleep(0.1)
        return False

    def _family(self, name: str) -> list[psutil.Process]:
        parent = psutil.Process(self.cluster.processes[name].pid)
        return [parent, *parent.children(recursive=True)]

    def _engine(self, name: str) -> list[psutil.Process]:
        found = [p for p in self._family(name) if ENGINE in p.cmdline()]
        assert len(found) == 1, f"{name} has {len(found)} engines"
        return found


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
