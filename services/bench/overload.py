"""Past capacity: what is served in time, what is refused and how fast, and who gets which share.

    python -m services.bench.overload [--seconds 20] [--factors 0.5,1,2,4] [--order fair]

One prefill and one decode worker with the real engine behind a real router. First the times of single requests, which
set the targets (`--ttft-x` and `--tpot-x` of their medians), then the capacity of a closed loop, then an open loop with
Poisson arrivals at each factor of it. Two tenants send: ``flood`` three quarters, ``calm`` one quarter. A request is
good when its first token, counted from the moment it was due, and its mean time per token keep the targets. Refusals
are timed from sending to the answer's end. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from services.bench.load.http import HttpError, Pool, Target
from services.bench.stage import free_port, process, wait_ready
from services.config import home

TENANTS = {"flood": 0.75, "calm": 0.25}  # share of arrivals
KEYS = {tenant: f"{tenant}-key-of-the-benchmark" for tenant in TENANTS}
SINGLE_REQUESTS = 8
USERS = 8
BUSY = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What each request asks for, and the targets in ms; 0: none."""

    input_tokens: int
    output_tokens: int
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    @property
    def headers(self) -> dict[str, str]:
        targets = {"X-PDRay-TTFT-MS": self.ttft_ms, "X-PDRay-TPOT-MS": self.tpot_ms}
        return {"X-PDRay-Explain": "1"} | {name: f"{ms:.0f}" for name, ms in targets.items() if ms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request; times in ms."""

    tenant: str
    status: int
    lag_ms: float  # due to sent: the tool's own
    total_ms: float  # sent to the end
    ttft_ms: float = 0.0  # due to first token
    tpot_ms: float = 0.0
    tokens: int = 0
    promised_ms: float = 0.0

    def is_good(self, shape: Shape) -> bool:
        in_time = self.ttft_ms <= (shape.ttft_ms or self.ttft_ms) and self.tpot_ms <= (shape.tpot_ms or self.tpot_ms)
        return self.status == 200 and self.tokens > 0 and in_time


class Client:
    """Sends streamed completions of random tokens, so that nothing is cached."""

    def __init__(self, url: str, seed: int) -> None:
        self._target = Target.parse(url)
        self._pools = {tenant: Pool(self._target, time.monotonic) for tenant in TENANTS}
        self._draw = random.Random(seed)

    async def send(self, tenant: str, shape: Shape, due_s: float) -> Outcome:
        prompt = [self._draw.randrange(1000, 40_000) for _ in range(shape.input_tokens)]
        fields = {"prompt": prompt, "max_tokens": shape.output_tokens, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {KEYS[tenant]}", **shape.headers}
        request = self._target.request("POST", "/v1/completions", headers, json.dumps(fields).encode())
        came: list[float] = []
        sent_s = time.monotonic()
        lag_ms = 1000 * (sent_s - due_s)

        def on_body(body: bytes, at_s: float) -> None:
            came.extend([at_s] * (body.count(b"data: {") if b'"text"' in body else 0))

        try:
            reply = await self._pools[tenant].ask(request, on_body)
        except HttpError:
            return Outcome(tenant=tenant, status=0, lag_ms=lag_ms, total_ms=1000 * (time.monotonic() - sent_s))
        promise = json.loads(reply.headers.get("x-pdray-decision", "{}")).get("promise") or {}
        outcome = Outcome(
            tenant=tenant,
            status=reply.status,
            lag_ms=lag_ms,
            total_ms=1000 * (time.monotonic() - sent_s),
            tokens=shape.output_tokens if came else 0,
            promised_ms=float(promise.get("ttft_ms", 0.0)),
        )
        if not came:
            return outcome
        tpot_ms = 1000 * (came[-1] - came[0]) / max(1, shape.output_tokens - 1)
        return replace(outcome, ttft_ms=1000 * (came[0] - due_s), tpot_ms=tpot_ms)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


async def closed_loop(client: Client, shape: Shape, users: int, seconds: float) -> list[Outcome]:
    """Each user sends again when the answer is there."""
    end_s, outcomes = time.monotonic() + seconds, list[Outcome]()

    async def user() -> None:
        while time.monotonic() < end_s:
            outcomes.append(await client.send("flood", shape, time.monotonic()))

    await asyncio.gather(*(user() for _ in range(users)))
    return outcomes


async def open_loop(client: Client, shape: Shape, per_s: float, seconds: float, seed: int) -> list[Outcome]:
    """Poisson arrivals; the clock alone decides when."""
    draw, start_s, at_s = random.Random(seed), time.monotonic(), 0.0
    tasks: list[asyncio.Task[Outcome]] = []
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        tenant = "flood" if draw.random() < TENANTS["flood"] else "calm"
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(client.send(tenant, shape, start_s + at_s)))
    return list(await asyncio.gather(*tasks))


def report(outcomes: Sequence[Outcome], shape: Shape, per_s: float, seconds: float) -> dict[str, Any]:
    """One point. ``good`` over served is what accepted requests were promised."""
    served = [o for o in outcomes if o.status == 200]
    good = [o for o in served if o.is_good(shape)]
    refused = [o for o in outcomes if o.status in BUSY]
    errors = [abs(o.promised_ms - o.ttft_ms) / o.ttft_ms for o in served if o.promised_ms and o.ttft_ms]
    return {
        "offered_per_s": round(per_s, 3),
        "sent": len(outcomes),
        "served": len(served),
        "refused": len(refused),
        "failed": len(outcomes) - len(served) - len(refused),
        "goodput_per_s": round(len(good) / seconds, 3),
        "served_in_time": round(len(good) / len(served), 4) if served else None,
        "ttft_ms": quantiles([o.ttft_ms for o in served]),
        "tpot_ms": quantiles([o.tpot_ms for o in served]),
        "refusal_ms": quantiles([o.total_ms for o in refused]),
        "client_lag_ms": quantiles([o.lag_ms for o in outcomes]),
        "ttft_prediction_error": round(statistics.median(errors), 4) if errors else None,
        "tenants": {tenant: _share(tenant, outcomes, good) for tenant in TENANTS},
    }


def _share(tenant: str, outcomes: Sequence[Outcome], good: Sequence[Outcome]) -> dict[str, Any]:
    own = [o for o in outcomes if o.tenant == tenant]
    return {
        "sent": len(own),
        "served": sum(o.status == 200 for o in own),
        "good": sum(o.tenant == tenant for o in good),
        "share_of_good": round(sum(o.tenant == tenant for o in good) / len(good), 4) if good else None,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest; empty for none."""
    if not values:
        return {}
    rising = sorted(values)
    at = {f"p{q}": rising[min(len(rising) - 1, q * len(rising) // 100)] for q in (50, 90, 99)}
    return {name: round(value, 2) for name, value in (at | {"max": rising[-1]}).items()}


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(input_tokens=options.input_tokens, output_tokens=options.output_tokens)
    client = Client(url, options.seed)
    try:
        single = [await client.send("flood", shape, time.monotonic()) for _ in range(1 + SINGLE_REQUESTS)][1:]
        if any(o.status != 200 for o in single):
            raise RuntimeError(f"single requests were answered with {[o.status for o in single]}")
        ttft_ms, tpot_ms = (statistics.median(getattr(o, f) for o in single) for f in ("ttft_ms", "tpot_ms"))
        full = await closed_loop(client, shape, USERS, options.seconds)
        capacity = sum(o.status == 200 for o in full) / options.seconds
        shape = replace(shape, ttft_ms=options.ttft_x * ttft_ms, tpot_ms=options.tpot_x * tpot_ms)
        points = {}
        for i, factor in enumerate(options.factors):
            outcomes = await open_loop(client, shape, factor * capacity, options.seconds, options.seed + i)
            points[f"{factor:g}"] = report(outcomes, shape, factor * capacity, options.seconds)
    finally:
        await client.close()
    peak = max(p["goodput_per_s"] for p in points.values())
    return {
        "unloaded": {"ttft_ms": round(ttft_ms, 1), "tpot_ms": round(tpot_ms, 2)},
        "targets": {"ttft_ms": round(shape.ttft_ms, 1), "tpot_ms": round(shape.tpot_ms, 2)},
        "capacity_per_s": round(capacity, 3),
        "points": points,
        "goodput_of_peak": {name: round(p["goodput_per_s"] / peak, 4) if peak else None for name, p in points.items()},
    }


@contextlib.contextmanager
def application(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Workers and a router of our own; gives its URL."""
    from services.engine.prepare import prepare

    model = prepare(options.model, cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    keys = [
        {"name": t, "tenant": t, "scopes": ["infer"], "hash": "sha256:" + hashlib.sha256(k.encode()).hexdigest()}
        for t, k in KEYS.items()
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    ports = [free_port() for _ in range(4)]
    settings = {
        "secret": "benchmark",
        "workers": [f"127.0.0.1:{p}" for p in ports[:2]],
        "redis": {"url": "none"},
        "engine": {"num_threads": 1},
        "router": {"port": ports[2], "grpc_port": ports[3]},
        "access": {"keys_file": str(folder / "keys.yaml")},
        "admission": {"order": options.order},
    }
    files = []
    for port in ports[:2]:
        files.append(folder / f"{port}.yaml")
        files[-1].write_text(yaml.safe_dump(settings | {"worker": {"port": port}}))
    with (
        process("services.prefill", files[0], model, "--worker-id", "prefill-0"),
        process("services.decode", files[1], model, "--worker-id", "decode-0"),
        process("services.router", files[0], model),
    ):
        wait_ready(ports[2])
        yield f"http://127.0.0.1:{ports[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Goodput, refusals and shares past capacity.")
    parser.add_argument("--url", default="", help="a server that runs already, without keys; default: our own")
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each point")
    parser.add_argument("--factors", type=lambda text: [float(x) for x in text.split(",")], default=[0.5, 1, 2, 4])
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--ttft-x", type=float, default=5.0, help="target over the median of a single request")
    parser.add_argument("--tpot-x", type=float, default=3.0)
    parser.add_argument("--order", default="fair")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdray-overload-") as folder:
        running = contextlib.nullcontext(options.url) if options.url else application(Path(folder), options)
        with running as url:
            result = asyncio.run(measure(url, options))
    shown = {"benchmark": "overload", **vars(options), "cores": os.cpu_count()}
    sys.stdout.write(json.dumps(shown | result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
