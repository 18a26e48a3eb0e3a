"""Random and mutated messages over a real channel: each ends with a status of ours, and health answers."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fronts import make_core, running, saying_each
from tests.grpc_fuzz import Maker, Rpc, rpcs

AT_ONCE = 8
LIMIT_S = 60.0
"""No call takes a second; past this one hangs."""
FORBIDDEN = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}
GAVE_UP_WRITING = "Internal error from Core"
"""INTERNAL of the client itself, which was still writing into a stream that the server had ended."""


async def outcome(channel: grpc.aio.Channel, rpc: Rpc, payloads: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """How the call ends; a stream that goes on by itself is left after some messages."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    begin: Any = kinds[rpc.takes_stream, rpc.gives_stream](rpc.path)
    call = begin(iter(payloads) if rpc.takes_stream else payloads[0], timeout=LIMIT_S)
    try:
        if not rpc.gives_stream:
            await call
        else:
            seen = 0
            async for _ in call:
                seen += 1
                if seen == 500 or rpc.path.endswith("/Watch"):
                    break
    except grpc.aio.AioRpcError as exc:
        if rpc.takes_stream and exc.details() == GAVE_UP_WRITING:
            return grpc.StatusCode.CANCELLED, GAVE_UP_WRITING
        return exc.code(), exc.details() or ""
    finally:
        call.cancel()
    return grpc.StatusCode.OK, ""


async def fuzz(port: int, seed: int, count: int) -> set[grpc.StatusCode]:
    """Send ``count`` calls; returns the statuses seen. Health is asked between them."""
    methods, maker, rng = rpcs(), Maker(random.Random(seed)), random.Random(seed + 1)
    seen: set[grpc.StatusCode] = set()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for start in range(0, count, AT_ONCE):
            batch = []
            for _ in range(min(AT_ONCE, count - start)):
                rpc = rng.choice(methods)
                batch.append((rpc, [maker.payload(rpc) for _ in range(rng.randrange(1, 4))]))
            ends = await asyncio.gather(*(outcome(channel, *one) for one in batch))
            for (rpc, payloads), (code, details) in zip(batch, ends, strict=True):
                told = f"seed {seed}, calls from {start}: {rpc.path} {code} {details!r} {payloads!r:.2000}"
                assert code not in FORBIDDEN, told
                seen.add(code)
            if start % (4 * AT_ONCE) == 0:
                reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
    return seen


@pytest.mark.parametrize(
    "count", [pytest.param(300), pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
async def test_no_message_meets_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int) -> None:
    core = make_core(tmp_path)
    core.flow.script = saying_each(*["Hello <tool_call> world"] * core.config.router.max_n)
    with caplog.at_level(logging.ERROR):
        async with running(core) as fronts:
            seen = await fuzz(fronts.grpc_port, seed=7, count=count)
            assert len(fronts.front.running) == 0
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= seen
    assert [r for r in caplog.records if r.name.startswith(("pdray", "grpc"))] == []
