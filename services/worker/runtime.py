"""One running worker: the core with its children, gRPC server and publisher, from start to stop.

start: card ─► children (memory, transports, model) ─► gRPC server ─► index
lost:  `lost` is set and `healthy` says why; whoever started the worker replaces it
stop:  drain ─► withdraw ─► streams end ─► children end ─► memory is gone
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from kvstore.geometry import LAYOUT_VERSION
from services.config import ServeConfig
from services.engine.shape import kv_geometry, resolve_dtype, resolve_max_model_len
from services.protocol.auth import SERVER_OPTIONS, CallAuth, sign_registration
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import ModelCard
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.protocol.tasks import end
from services.protocol.version import PROTOCOL_VERSION
from services.worker.children import Children, WorkerLost
from services.worker.core import WorkerCore
from services.worker.publisher import Publisher
from services.worker.role import Role
from services.worker.service import WorkerService

_log = logging.getLogger("pdray.worker")


class WorkerRuntime:
    """Owns the processes, sockets and memory of one worker. Starts and stops once."""

    def __init__(
        self,
        config: ServeConfig,
        role: str,
        model_folder: Path,
        make_role: Callable[[WorkerCore], Role],
        worker_id: str = "",
    ) -> None:
        self._config = config
        self._card = ModelCard.load(model_folder)
        self._dtype = resolve_dtype(config.model.dtype)
        self._geometry = kv_geometry(self._card, config.engine, self._dtype)
        self.registration = self._describe(role, worker_id)
        self._core = WorkerCore(config, self.registration, make_role)
        self._children = Children(config, self._card, self._core, self._lose)
        self._server: grpc.aio.Server | None = None
        self._publisher: Publisher | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.lost = asyncio.Event()
        self.lost_reason = ""

    @property
    def address(self) -> str:
        return self.registration.address

    @property
    def core(self) -> WorkerCore:
        return self._core

    async def start(self) -> None:
        """Returns when the worker serves. Raises WorkerLost."""
        try:
            await self._children.start()
            await self._start_server()
        except BaseException:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._sweep(), name="sweep"), asyncio.create_task(self._ping(), name="ping")]

    def healthy(self) -> str:
        """Empty, or why this worker must be replaced."""
        if self.lost_reason:
            return self.lost_reason
        if self._core.stalled():
            return f"the engine has been silent for {self._core.clock() - self._core.last_progress_s:.0f} s"
        return ""

    def autoscaling_stats(self) -> dict[str, float]:
        """What a scaling policy may use: queue, load, and the predicted TTFT and TPOT of a request that came now."""
        s = self._core.stats
        rate = s.prefill_tokens_per_s
        return {
            "queued": float(s.waiting),
            "running": float(s.running),
            "predicted_ttft_ms": 1000 * s.waiting_prefill_tokens / rate if rate else 0.0,
            "predicted_tpot_ms": s.step_ms,
            "kv_used_fraction": 1 - (s.blocks_free + s.blocks_cached) / s.blocks_total if s.blocks_total else 0.0,
        }

    async def drain(self, limit_s: float) -> bool:
        """Take no new request and let the ones here end; True where all did within the limit."""
        self._core.draining = True
        self.registration.draining = True
        sign_registration(self.registration, self._config.secret)
        self._core.hub.announce()
        if self._publisher is not None:
            self._publisher.announce_now()
        deadline = self._core.clock() + limit_s
        while len(self._core.requests) and self._core.clock() < deadline:
            await asyncio.sleep(0.05)
        while not self._core.hub.drained and self._core.clock() < deadline:
            await asyncio.sleep(0.02)
        return not len(self._core.requests)

    async def stop(self) -> None:
        """End everything this worker started, within seconds. Requests that still live get an error."""
        if self._stopping:
            return
        self._stopping = True
        await self._core.fail_all(RequestError(ErrorCode.WORKER_LOST, "the worker stopped"))
        await end(*self._tasks)
        self._core.hub.close()
        if self._publisher is not None:
            await self._publisher.stop()
        if self._server is not None:
            await self._server.stop(grace=0.5)
        await self._core.stop()
        await self._children.stop()

    # --- start ---

    def _describe(self, role: str, worker_id: str) -> worker_pb2.Registration:
        card = self._card
        return worker_pb2.Registration(
            worker_id=worker_id or f"{role}-{secrets.token_hex(4)}",
            role=role,
            epoch=secrets.token_hex(6),
            fingerprint=worker_pb2.Fingerprint(
                model=card.model_fingerprint,
                tokenizer=card.tokenizer_fingerprint,
                dtype=self._dtype,
                block_size=self._config.engine.block_size,
                layout_version=LAYOUT_VERSION,
                geometry_json=json.dumps(self._geometry.to_dict()),
                protocol_version=PROTOCOL_VERSION,
            ),
            node=socket.gethostname(),
            num_blocks=self._geometry.num_blocks[0],
            max_model_len=resolve_max_model_len(card, self._config.model.max_model_len),
            model_name=self._config.model.served_name or card.name,
            issued_at=time.time(),
        )

    async def _start_server(self) -> None:
        c = self._config
        self._server = grpc.aio.server(interceptors=[CallAuth(c.secret)], options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(self._core), self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(f"{c.worker.host}:{c.worker.port}")
        if port == 0:
            raise WorkerLost(f"cannot listen on {c.worker.host}:{c.worker.port} (worker.host, worker.port)")
        self.registration.address = f"{c.worker.host}:{port}"
        sign_registration(self.registration, c.secret)
        await self._server.start()
        if "://" in c.redis.url:
            from kvstore.index.redis import RedisIndex

            index = RedisIndex(c.redis.address, c.redis.namespace, c.redis.ttl_s)
            self._publisher = Publisher(index, lambda: self.registration, self._core.load, c.redis.heartbeat_s)
            self._core.on_blocks = self._publisher.note
            self._publisher.start()

    def _lose(self, reason: str) -> None:
        self.lost_reason = reason
        _log.error("worker %s is lost: %s", self.registration.worker_id, reason)
        self.lost.set()

    # --- loops ---

    async def _sweep(self) -> None:
        while True:
            await self._core.sweep()
            await asyncio.sleep(0.2)

    async def _ping(self) -> None:
        while True:
            self._core.ping_engine()
            await asyncio.sleep(1.0)


async def run_until_signal(runtime: WorkerRuntime, signals: asyncio.Event) -> int:
    """Serve until a signal (drain, exit code 0) or until the worker is lost (exit code 1)."""
    await runtime.start()
    _log.info("worker %s (pid %d) serves on %s", runtime.registration.worker_id, os.getpid(), runtime.address)
    waits = [asyncio.create_task(signals.wait()), asyncio.create_task(runtime.lost.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not runtime.lost.is_set():
        await runtime.drain(runtime.core.config.worker.drain_s)
    await runtime.stop()
    return 1 if runtime.lost.is_set() else 0
