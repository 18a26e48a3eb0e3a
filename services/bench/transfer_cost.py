"""What moving the KV costs the prefill worker: a real engine with and without a hand-off, in turns. One JSON line.

    python -m services.bench.transfer_cost [--tokens 1500] [--rounds 7] [--transport mooncake] [--threads 0]

The engine computes fresh prompts of the default model; every other one is pushed, layer by layer, by a real transfer
process into the memory of a second one. Reported, as shares of the time to compute a prompt: what is exposed (last
layer computed .. last byte landed), what submitting and hashing take in the transfer process, and how much longer
computing takes. The rate of the wire comes from prompts that are pushed when they are computed already; with Mooncake
it is compared with Mooncake's own benchmark tool at writes of the same size, in the same run.

Where the engine uses every core (``--threads 0``), what the two transfer processes compute can only be taken from it:
``cpu_bound_ratio`` is how much longer a prompt must take at least, their CPU time spread over all cores. With a core
less for the engine nothing is taken from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from kvstore.blocks import block_names, namespace_root
from kvstore.geometry import LAYOUT_VERSION, KVGeometry, KVGroup
from kvstore.transfer import messages as m
from services.bench.transfer_overlap import Mode, Scenario
from services.config import EngineConfig, TransferConfig, home, set_mooncake_environment
from services.engine.messages import AddSequence, PrefillStarted, ReleaseSequence, Sampling

TOOL_S = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Scenario):
    """Room for several prompts, so that none waits for blocks; ``dtype`` is the model's."""

    dtype: str
    threads: int = 0  # of the engine; 0: one for each core

    @property
    def geometry(self) -> KVGeometry:
        group = KVGroup(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=self.dtype)
        return KVGeometry(groups=(group,), num_blocks=(4 * -(-self.tokens // group.block_size),))


@dataclass(frozen=True, slots=True)
class Moved:
    compute_ms: float
    transfer_cpu_ms: float  # of both transfer processes, from the start of computing to the last byte
    exposed_ms: float
    submit_ms: float
    digest_ms: float
    wire_ms: float  # first submitted .. last landed
    num_bytes: int
    runs: int


class Prefill:
    """An engine in this process over the writer's memory, and the pair of transfer processes behind it."""

    def __init__(self, model: Path, sizes: Sizes) -> None:
        from services.engine.build import build_engine
        from services.engine.child import child_config

        self.pair = Mode(sizes, True)
        self._geometry = sizes.geometry
        self._root = namespace_root(
            salt="", model="bench", tokenizer="bench", dtype=sizes.dtype, block_size=16, layout_version=LAYOUT_VERSION
        )
        config = child_config(
            folder=model,
            role="prefill",
            dtype=sizes.dtype,
            max_model_len=8192,
            engine=EngineConfig(max_num_batched_tokens=sizes.chunk_tokens, num_threads=sizes.threads),
            geometry=sizes.geometry,
        )
        writer = self.pair.writer
        self._engine = build_engine(self._on_engine, os.dup(writer.fd), writer.progress_fd, json.loads(config))
        self._number = 0
        self._late: PrefillStarted | None = None
        self._is_late = self._hands_off = False

    def run(self, prompt: Sequence[int], *, hand_off: bool) -> tuple[float, float]:
        """Compute a prompt; returns when it began and ended, in monotonic seconds."""
        self._number += 1
        self._hands_off = hand_off
        self._engine.handle(
            AddSequence(
                seq_id=f"s{self._number}",
                prompt_ids=tuple(prompt),
                sampling=Sampling(max_tokens=2 if hand_off else 1, ignore_eos=True),
                root=self._root,
                block_names=tuple(block_names(prompt, 16, self._root)),
                hand_off=hand_off,
            )
        )
        begun_s = time.monotonic()
        while self._engine.advance():
            pass
        return begun_s, time.monotonic()

    async def push(self, prompt: Sequence[int], *, late: bool = False) -> Moved:
        """Compute and hand over; with ``late`` the ticket is opened once everything is computed."""
        self._is_late = late
        cpu_s = self._transfer_cpu_s()
        begun_s, ended_s = self.run(prompt, hand_off=True)
        if self._late is not None:
            self._open(self._late)
            self._late = None
        writer, seq_id = self.pair.writer, f"s{self._number}"
        pushed = await writer.answer()
        if not isinstance(pushed, m.Pushed):
            raise RuntimeError(f"the hand-off failed: {pushed}")
        cpu_ms = (self._transfer_cpu_s() - cpu_s) * 1000
        writer.client.send(m.CloseTicket(ticket_id=seq_id))
        await writer.answer()
        writer.client.send(m.CloseSource(seq_id=seq_id))
        self._engine.handle(ReleaseSequence(seq_id=seq_id))
        landed_s = max(layer.done_s for layer in pushed.layers)
        computed_s = max(layer.computed_s for layer in pushed.layers)
        return Moved(
            compute_ms=(ended_s - begun_s) * 1000,
            transfer_cpu_ms=cpu_ms,
            exposed_ms=max(0.0, landed_s - computed_s) * 1000,
            submit_ms=pushed.submit_s * 1000,
            digest_ms=pushed.digest_s * 1000,
            wire_ms=(landed_s - min(layer.submitted_s for layer in pushed.layers)) * 1000,
            num_bytes=pushed.num_bytes,
            runs=len(pushed.extents),
        )

    def _transfer_cpu_s(self) -> float:
        """CPU that both transfer processes have used."""
        times = [psutil.Process(w.client.pid).cpu_times() for w in (self.pair.writer, self.pair.reader)]
        return float(sum(t.user + t.system for t in times))

    def _on_engine(self, message: Any) -> None:
        if not isinstance(message, PrefillStarted) or not self._hands_off:
            return
        blocks, seq_id = message.block_ids, message.seq_id
        self.pair.writer.client.send(m.OpenSource(seq_id=seq_id, block_ids=blocks, ready_blocks=0))
        if self._is_late:
            self._late = message
        else:
            self._open(message)

    def _open(self, started: PrefillStarted) -> None:
        pair, seq_id = self.pair, started.seq_id
        pair.reader.client.send(m.Allow(ticket_id=seq_id, worker_id="P", epoch="1"))
        pair.writer.client.send(
            m.OpenTicket(
                ticket_id=seq_id,
                seq_id=seq_id,
                worker_id="D",
                epoch="1",
                segment=pair.segment,
                geometry=self._geometry.to_dict(),
                block_ids=started.block_ids,
                skip_blocks=0,
            )
        )


def mooncake_rate(block_bytes: int) -> float:
    """GB/s of Mooncake's own tool: writes of this size over loopback TCP, one thread, 30 to a batch; 0 without it.

    Source: ``transfer_engine_bench`` of the Mooncake wheel.
    """
    tool = shutil.which("transfer_engine_bench", path=str(Path(sys.executable).parent)) or ""
    if not tool:
        return 0.0
    env = {"MC_LOG_LEVEL": "INFO", "GLOG_logtostderr": "1"}
    common = ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--buffer_size=268435456", "--auto_discovery=true"]
    set_mooncake_environment(TransferConfig(), env)
    target = subprocess.Popen(
        [tool, "--mode=target", "--local_server_name=127.0.0.1", *common],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert target.stderr is not None
        found = next((x for x in map(_LISTENS.search, target.stderr) if x), None)
        if found is None:
            return 0.0
        sizes = [f"--block_size={block_bytes}", "--batch_size=30", "--threads=1", f"--duration={TOOL_S}"]
        where = ["--mode=initiator", "--operation=write", "--local_server_name=127.0.0.1", f"--segment_id={found[1]}"]
        done = subprocess.run([tool, *where, *sizes, *common], capture_output=True, text=True, env=env, timeout=60)
    finally:
        target.kill()
        target.wait(10)
    rate = _RATE.search(done.stderr + done.stdout)
    return float(rate[1]) if rate else 0.0


_LISTENS = re.compile(r"listening on (\S+:\d+)")
_RATE = re.compile(r"throughput:? ([0-9.]+) ?GB/s", re.IGNORECASE)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


async def measure(model: Path, sizes: Sizes) -> dict[str, Any]:
    rng = random.Random(3)

    def fresh() -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(sizes.tokens)]

    prefill = Prefill(model, sizes)
    await prefill.pair.start()
    try:
        await prefill.push(fresh())  # connects
        alone, moved, late = [], [], []
        for _ in range(sizes.rounds):
            begun_s, ended_s = prefill.run(fresh(), hand_off=False)
            alone.append((ended_s - begun_s) * 1000)
            moved.append(await prefill.push(fresh()))
            late.append(await prefill.push(fresh(), late=True))
    finally:
        await prefill.pair.stop()
    compute_ms, alone_ms = median([x.compute_ms for x in moved]), median(alone)
    cores = os.cpu_count() or 1
    transfer_cpu_ms = statistics.mean([x.transfer_cpu_ms for x in moved])  # its clock ticks in 10 ms
    rates = [x.num_bytes / x.wire_ms / 1e6 for x in late]
    run_bytes = late[0].num_bytes // late[0].runs
    theirs = mooncake_rate(run_bytes) if prefill.pair.transport == "mooncake" else 0.0
    return {
        "benchmark": "transfer_cost",
        **asdict(sizes),
        "transport": prefill.pair.transport,
        "cores": cores,
        "bytes": moved[0].num_bytes,
        "runs_per_layer": moved[0].runs / sizes.geometry.groups[0].num_layers,
        "prefill_ms": round(compute_ms, 1),
        "prefill_without_transfer_ms": round(alone_ms, 1),
        "ratio_with_to_without": round(compute_ms / alone_ms, 3),
        "transfer_cpu_ms": round(transfer_cpu_ms, 1),
        "cpu_bound_ratio": round(1 + transfer_cpu_ms / cores / alone_ms, 3) if sizes.threads in (0, cores) else 1.0,
        "exposed_share": round(median([x.exposed_ms for x in moved]) / compute_ms, 5),
        "submit_share": round(median([x.submit_ms for x in moved]) / compute_ms, 5),
        "digest_share": round(median([x.digest_ms for x in moved]) / compute_ms, 5),
        "wire_gb_per_s": round(median(rates), 2),
        "write_bytes": run_bytes,
        "mooncake_tool_gb_per_s": theirs,
        "rate_to_tool": round(median(rates) / theirs, 2) if theirs else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", default="mooncake")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    from services.engine.prepare import prepare
    from services.engine.shape import resolve_dtype

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    sizes = Sizes(**vars(options), layer_ms=0.0, mbytes_per_s=0, dtype=resolve_dtype("auto"))
    sys.stdout.write(json.dumps(asyncio.run(measure(model, sizes))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
