"""A worker without a model: it gives every request one token per tick. What is left to measure is the way of a token.

Everything but the engine is the real thing: gRPC service, Attach hub, registration. ``python -m services.bench.paced``.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import secrets
import socket
import sys
import time
from pathlib import Path

import grpc.aio

from kvstore.geometry import LAYOUT_VERSION
from services import config as settings
from services.config import ServeConfig
from services.engine import messages as m
from services.engine.shape import kv_geometry, resolve_dtype, resolve_max_model_len
from services.protocol.auth import SERVER_OPTIONS, CallAuth, sign_registration
from services.protocol.model_card import ModelCard
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.worker.core import WorkerCore
from services.worker.live import LiveRequest
from services.worker.role import Role
from services.worker.service import WorkerService


class Paced(Role):
    """Takes whole requests, like a mixed worker; token ids count up from 1,000."""

    name = "mixed"

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._running: dict[str, LiveRequest] = {}

    async def submit(self, live: LiveRequest, reader: worker_pb2.Reader | None) -> None:
        self._running[live.seq_id] = live

    async def abort(self, live: LiveRequest, reason: str) -> None:
        self._running.pop(live.seq_id, None)

    def tick(self) -> None:
        """One step: a token for each request, and one message for each router."""
        core = self._core
        core.last_progress_s = core.clock()
        core.stats = dataclasses.replace(core.stats, step=core.stats.step + 1, running=len(self._running))
        for live in list(self._running.values()):
            position = live.tokens
            last = position + 1 >= live.request.sampling.max_tokens
            output = m.SequenceOutput(
                seq_id=live.seq_id,
                position=position,
                token_ids=(1000 + position % 1000,),
                finish_reason="length" if last else "",
            )
            lay_ms = 0.0 if position else 1000 * (core.clock() - live.accepted_s)
            times = worker_pb2.StageTimes(queue_ms=lay_ms) if last or not position else None
            core.emit_tokens(live, output, times)
            if last:
                del self._running[live.seq_id]
                core.requests.close(live.seq_id)
        core.hub.flush()


def _registration(config: ServeConfig, card: ModelCard) -> worker_pb2.Registration:
    dtype = resolve_dtype(config.model.dtype)
    geometry = kv_geometry(card, config.engine, dtype)
    return worker_pb2.Registration(
        worker_id="paced-0",
        role="mixed",
        epoch=secrets.token_hex(4),
        node=socket.gethostname(),
        num_blocks=geometry.num_blocks[0],
        max_model_len=resolve_max_model_len(card, config.model.max_model_len),
        model_name=card.name,
        transport="none",
        issued_at=time.time(),
        fingerprint=worker_pb2.Fingerprint(
            model=card.model_fingerprint,
            tokenizer=card.tokenizer_fingerprint,
            dtype=dtype,
            block_size=config.engine.block_size,
            layout_version=LAYOUT_VERSION,
            geometry_json=json.dumps(geometry.to_dict()),
        ),
    )


async def serve(config: ServeConfig, card: ModelCard, cadence_s: float) -> None:
    """Until the process is ended."""
    registration = _registration(config, card)
    core = WorkerCore(config, registration, Paced)
    role = core.role
    assert isinstance(role, Paced)
    server = grpc.aio.server(interceptors=[CallAuth(config.secret)], options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(core), server)  # type: ignore[no-untyped-call]
    registration.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{config.worker.port}')}"
    sign_registration(registration, config.secret)
    await server.start()
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + cadence_s, loop.time())
        await asyncio.sleep(due - loop.time())
        role.tick()


def main() -> int:
    parser = argparse.ArgumentParser(description="A worker that emits tokens at a fixed cadence.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--cadence-ms", type=float, default=20.0)
    options = parser.parse_args()
    asyncio.run(serve(settings.load(options.config), ModelCard.load(options.model), options.cadence_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
