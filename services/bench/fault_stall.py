"""What a faulty peer costs others: gaps of one stream while a prefill worker freezes, is fenced, wakes up, and dies.

    python -m services.bench.fault_stall [--seconds 10] [--transport mooncake] [--mb-per-s 10]

Two prefill workers, one decode worker, one router. A long stream runs on the decode worker while other prompts arrive
through both prefill workers over a slow link, so that transfers are always under way. Then one prefill worker is
stopped (its lease lapses, the decode worker fences it), continued, and killed, each for ``--seconds``. Reported for
each phase: the stream's gaps between tokens as its client sees them, and by how much their p99 exceeds that of the
phase without a fault. One JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from services.bench.stage import free_port, process, wait_ready
from services.config import home

LEASE_MS = 2000
PROMPT_TOKENS = 200
SENDERS = 2


@contextlib.contextmanager
def application(folder: Path, model: Path, options: argparse.Namespace) -> Iterator[tuple[int, psutil.Process]]:
    """Gives the router's port and the service process of the prefill worker that will fail."""
    ports = [free_port() for _ in range(5)]
    settings = {
        "secret": "benchmark",
        "workers": [f"127.0.0.1:{p}" for p in ports[:3]],
        "redis": {"url": "none"},
        "engine": {"num_threads": 1},
        "transfer": {
            "transport": options.transport,
            "lease_ms": LEASE_MS,
            "lease_renew_ms": LEASE_MS // 4,
            "throttle_bytes_per_s": int(options.mb_per_s * 1e6),
        },
        "router": {"port": ports[3], "grpc_port": ports[4], "policy": "round-robin"},
    }
    files = []
    for port in ports[:3]:
        file = folder / f"{port}.yaml"
        file.write_text(yaml.safe_dump(settings | {"worker": {"port": port}}))
        files.append(file)
    with (
        process("services.prefill", files[0], model, "--worker-id", "prefill-0"),
        process("services.prefill", files[1], model, "--worker-id", "prefill-1") as victim,
        process("services.decode", files[2], model, "--worker-id", "decode-0"),
        process("services.router", files[0], model),
    ):
        wait_ready(ports[3])
        yield ports[3], victim


def post(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


class Stream(threading.Thread):
    """One endless answer; notes when each token came. When one ends, the next begins."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.gaps: list[tuple[float, float]] = []  # (when, s)
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            last_s = 0.0
            body = {"prompt": [7, 8, 9], "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
            with post(self._port, body) as reply:
                for line in reply:
                    if self.ended:
                        return
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    if last_s:
                        self.gaps.append((now, now - last_s))
                    last_s = now

    def between(self, start_s: float, stop_s: float) -> list[float]:
        """Gaps in ms of tokens that came in this time."""
        return sorted(gap * 1000 for at, gap in self.gaps if start_s <= at < stop_s)


class Sender(threading.Thread):
    """Fresh prompts one after another; failures are counted, since a worker is being broken meanwhile."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._port, self._rng = port, random.Random(seed)
        self.served = self.failed = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            prompt = [self._rng.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)]
            try:
                with post(self._port, {"prompt": prompt, "max_tokens": 2, "temperature": 0}) as reply:
                    reply.read()
                self.served += 1
            except (urllib.error.URLError, OSError):
                self.failed += 1
                time.sleep(0.2)


def signal_all(service: psutil.Process, number: int) -> None:
    for one in [*service.children(recursive=True), service]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def summary(gaps: Sequence[float]) -> dict[str, float]:
    return {
        "tokens": len(gaps),
        "p50_ms": round(statistics.median(gaps), 1),
        "p99_ms": round(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 1),
        "max_ms": round(gaps[-1], 1),
    }


def measure(port: int, victim: psutil.Process, seconds: float) -> dict[str, Any]:
    stream, senders = Stream(port), [Sender(port, seed) for seed in range(SENDERS)]
    for thread in (stream, *senders):
        thread.start()
    time.sleep(3.0)
    phases: dict[str, Any] = {}
    for name, number in (
        ("no_fault", 0),
        ("frozen", signal.SIGSTOP),
        ("woken", signal.SIGCONT),
        ("dead", signal.SIGKILL),
    ):
        start_s = time.monotonic()
        if number:
            signal_all(victim, number)
        time.sleep(seconds)
        phases[name] = summary(stream.between(start_s, time.monotonic()))
    stream.ended = True
    for sender in senders:
        sender.ended = True
    for thread in (stream, *senders):
        thread.join(30)
    base = phases["no_fault"]["p99_ms"]
    return {
        **phases,
        "p99_added_ms": {k: round(v["p99_ms"] - base, 1) for k, v in phases.items() if k != "no_fault"},
        "prompts_served": sum(s.served for s in senders),
        "prompts_failed": sum(s.failed for s in senders),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mb-per-s", type=float, default=10.0)
    parser.add_argument("--transport", default="mooncake")
    options = parser.parse_args()
    from services.engine.prepare import prepare

    model = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    with tempfile.TemporaryDirectory() as folder, application(Path(folder), model, options) as (port, victim):
        result = measure(port, victim, options.seconds)
    line = {"benchmark": "fault_stall", **vars(options), "cores": psutil.cpu_count(), **result}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
