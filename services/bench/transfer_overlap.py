"""How much of a hand-off hides behind computing: layer by layer against chunk by chunk, one JSON line.

    python -m services.bench.transfer_overlap --transport mooncake --tokens 1500 --mbytes-per-s 500

Two real transfer processes move the KV of one prompt; the engine is a timer that takes ``--layer-ms`` for each layer
of a chunk. Both modes run in turns in the same invocation, over the same memory and wire. ``exposed_ms`` is the time
from the last computed layer to the last byte in the reader's memory: what a hand-off adds to the first token of
decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer import messages as m
from kvstore.transfer.client import TransferClient
from kvstore.transfer.progress import Chunk, ProgressSender
from services.config import TransferConfig, set_mooncake_environment

ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    transport: str
    tokens: int
    chunk_tokens: int
    layer_ms: float  # computing one layer of one chunk
    mbytes_per_s: int  # of the wire; 0: as fast as it goes
    rounds: int

    @property
    def geometry(self) -> KVGeometry:
        """SmolLM2-135M in bfloat16, with room for the prompt."""
        group = KVGroup(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
        return KVGeometry(groups=(group,), num_blocks=(-(-self.tokens // group.block_size),))


@dataclass(frozen=True, slots=True)
class Round:
    total_ms: float  # first layer begun .. all bytes landed
    exposed_ms: float  # last layer computed .. all bytes landed
    num_bytes: int


class Worker:
    """One transfer process over memory of its own."""

    def __init__(self, worker_id: str, scenario: Scenario) -> None:
        self.worker_id = worker_id
        self._scenario = scenario
        self.fd = os.memfd_create(worker_id)
        os.ftruncate(self.fd, scenario.geometry.total_bytes)
        self.client = TransferClient()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        engine_end, self._process_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.progress_fd = engine_end.detach()
        self.progress = ProgressSender(self.progress_fd, scenario.geometry.groups[0].num_layers)

    async def start(self, layerwise: bool) -> m.Started:
        env: dict[str, str] = {}
        set_mooncake_environment(TransferConfig(), env)
        start = m.Start(
            geometry=self._scenario.geometry.to_dict(),
            transport=self._scenario.transport,
            protocol="tcp",
            device="",
            host="127.0.0.1",
            secret=f"benchmark of process {os.getpid()}",
            digests=True,
            layerwise=layerwise,
            max_outstanding=512,
            fence_after_ms=2000,
            throttle_bytes_per_s=self._scenario.mbytes_per_s * 1_000_000,
        )
        return await self.client.start(
            self.fd, self._process_end.fileno(), start, self._inbox.put_nowait, lambda _code: None, env
        )

    async def answer(self) -> Any:
        return await asyncio.wait_for(self._inbox.get(), ANSWER_S)

    async def stop(self) -> None:
        await self.client.stop()
        self._process_end.close()
        os.close(self.fd)


async def compute(scenario: Scenario, writer: Worker, seq_id: str, first_step: int) -> float:
    """Report each layer of each chunk as an engine does; returns when the last one was computed."""
    group, num_blocks = scenario.geometry.groups[0], scenario.geometry.num_blocks[0]
    chunk_blocks = scenario.chunk_tokens // group.block_size
    due_s = time.monotonic()
    for number, first in enumerate(range(0, num_blocks, chunk_blocks)):
        count, step = min(chunk_blocks, num_blocks - first), first_step + number
        writer.progress.begin(step, [Chunk(seq_id, first, count, first + count == num_blocks)])
        for layer in range(group.num_layers):
            due_s += scenario.layer_ms / 1000
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            writer.progress.layer(step, layer, time.monotonic())
        writer.progress.end(step, time.monotonic())
    return time.monotonic()


async def hand_off(scenario: Scenario, writer: Worker, reader: Worker, segment: str, number: int) -> Round:
    blocks, seq_id = tuple(range(scenario.geometry.num_blocks[0])), f"sequence-{number}"
    reader.client.send(m.Allow(ticket_id=seq_id, worker_id=writer.worker_id, epoch="1"))
    writer.client.send(m.OpenSource(seq_id=seq_id, block_ids=blocks, ready_blocks=0))
    writer.client.send(
        m.OpenTicket(
            ticket_id=seq_id,
            seq_id=seq_id,
            worker_id=reader.worker_id,
            epoch="1",
            segment=segment,
            geometry=scenario.geometry.to_dict(),
            block_ids=blocks,
            skip_blocks=0,
        )
    )
    begun_s = time.monotonic()
    computed_s = await compute(scenario, writer, seq_id, number * 10_000)
    pushed = await writer.answer()
    if not isinstance(pushed, m.Pushed):
        raise RuntimeError(f"the hand-off failed: {pushed}")
    landed_s = max(layer.done_s for layer in pushed.layers)
    writer.client.send(m.CloseTicket(ticket_id=seq_id))
    await writer.answer()
    writer.client.send(m.CloseSource(seq_id=seq_id))
    return Round((landed_s - begun_s) * 1000, max(0.0, landed_s - computed_s) * 1000, pushed.num_bytes)


class Mode:
    """A pair of workers that hand over either layer by layer or chunk by chunk."""

    def __init__(self, scenario: Scenario, layerwise: bool) -> None:
        self._scenario = scenario
        self._layerwise = layerwise
        self.writer, self.reader = Worker("P", scenario), Worker("D", scenario)
        self.segment = ""
        self.transport = ""
        self.rounds: list[Round] = []

    async def start(self) -> None:
        started, _ = await asyncio.gather(self.writer.start(self._layerwise), self.reader.start(self._layerwise))
        self.transport = started.transport
        self.reader.client.send(m.OpenListener(worker_id="P", epoch="1"))
        self.segment = (await self.reader.answer()).segment

    async def run(self, number: int, *, counts: bool) -> None:
        result = await hand_off(self._scenario, self.writer, self.reader, self.segment, number)
        if counts:
            self.rounds.append(result)

    async def stop(self) -> None:
        await asyncio.gather(self.writer.stop(), self.reader.stop())

    def summary(self) -> dict[str, float]:
        def median(values: list[float]) -> float:
            return round(statistics.median(values), 2)

        exposed = [r.exposed_ms for r in self.rounds]
        return {
            "exposed_ms_p50": median(exposed),
            "exposed_ms_max": round(max(exposed), 2),
            "total_ms_p50": median([r.total_ms for r in self.rounds]),
        }


async def measure(scenario: Scenario) -> dict[str, Any]:
    modes = {"layer_by_layer": Mode(scenario, True), "chunk_by_chunk": Mode(scenario, False)}
    try:
        for mode in modes.values():
            await mode.start()
            await mode.run(0, counts=False)  # connects
        for number in range(1, scenario.rounds + 1):
            for mode in modes.values():
                await mode.run(number, counts=True)
    finally:
        for mode in modes.values():
            await mode.stop()
    first = modes["layer_by_layer"]
    return {
        "benchmark": "transfer_overlap",
        **asdict(scenario),
        "transport": first.transport,
        "bytes": first.rounds[0].num_bytes,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        **{name: mode.summary() for name, mode in modes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--layer-ms", type=float, default=4.0)
    parser.add_argument("--mbytes-per-s", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    scenario = Scenario(**vars(parser.parse_args()))
    sys.stdout.write(json.dumps(asyncio.run(measure(scenario))) + "\n")


if __name__ == "__main__":
    main()
