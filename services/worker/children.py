"""The two child processes of a worker and the memory that they share.

memory ─► transfer child (opens the transport) ─► engine child (loads the model)
engine child ends ─► the worker is lost
transfer child ends ─► its tickets are lost (that fenced them), it is started again
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from kvstore.errors import FailureKind, TransportUnavailable
from kvstore.process import Child
from kvstore.tensors import KVMemory
from kvstore.transfer import messages as t
from kvstore.transfer.client import TransferClient
from kvstore.transfer.options import ORDER
from services import config as settings
from services.config import ServeConfig
from services.engine import messages as m
from services.engine.child import CHILD_ENV, child_config
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import ModelCard
from services.worker.core import WorkerCore

ENGINE_START_S = 300.0
TRANSFER_RESTARTS = 5
"""Restarts of the transfer process within a minute; one more and the worker is lost."""
STOP_S = 4.0

_log = logging.getLogger("pdray.worker")


class WorkerLost(RuntimeError):
    """The worker could not start, or lost its engine; the message says why."""


class Children:
    """Owns memory, progress socket and both processes, which die with the thread of the event loop."""

    def __init__(self, config: ServeConfig, card: ModelCard, core: WorkerCore, on_lost: Callable[[str], None]) -> None:
        self._config = config
        self._card = card
        self._core = core
        self._on_lost = on_lost
        self._memory: KVMemory | None = None
        self._progress: tuple[socket.socket, socket.socket] | None = None
        self._engine = Child(m.CODEC, self._on_engine, self._on_engine_exit, "engine")
        self._engine_ready: asyncio.Future[m.EngineReady] | None = None
        self._transfer: TransferClient | None = None
        self._restarts: list[float] = []
        self._stopping = False

    async def start(self) -> None:
        """Returns when the model is loaded and the transport runs. Raises WorkerLost."""
        self._memory = KVMemory.create(self._core.geometry)
        self._progress = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        await self._start_transfer(self._memory, self._progress[1])
        await self._start_engine(self._memory, self._progress[0])

    async def stop(self) -> None:
        self._stopping = True
        stops = [self._engine.stop(STOP_S)]
        if self._transfer is not None:
            stops.append(self._transfer.stop())
        await asyncio.gather(*stops)
        for end in self._progress or ():
            end.close()
        if self._memory is not None:
            self._memory.close()

    async def _start_transfer(self, memory: KVMemory, progress: socket.socket) -> None:
        c = self._config.transfer
        client = TransferClient()
        mooncake: dict[str, str] = {}
        settings.set_mooncake_environment(c, mooncake)
        start = t.Start(
            geometry=self._core.geometry.to_dict(),
            transport=self._transport_name(),
            allow_fallback=c.allow_fallback,
            protocol=c.protocol,
            device=c.device,
            host=self._config.worker.host,
            secret=self._config.secret,
            digests=c.digests,
            layerwise=c.layerwise,
            max_outstanding=c.max_outstanding,
            fence_after_ms=c.fence_after_ms,
            throttle_bytes_per_s=c.throttle_bytes_per_s,
        )
        try:
            started = await client.start(
                memory.fd,
                progress.fileno(),
                start,
                self._core.on_transfer,
                self._on_transfer_exit,
                mooncake,
            )
        except TransportUnavailable as exc:
            raise WorkerLost(str(exc)) from None
        self._transfer = client
        self._core.send_transfer = client.send
        self._core.kill_transfer = client.kill
        self._core.registration.transport = started.transport
        self._core.registration.spare_transports[:] = started.spares
        if started.note:
            self._core.registration.transport_note = started.note
            _log.warning("%s", started.note)

    def _transport_name(self) -> str:
        """What is asked for; once this worker is registered, what it was registered with."""
        wanted = self._config.transfer.wanted
        has_choice = wanted == "auto" or wanted in ORDER
        return (self._core.registration.transport if has_choice else "") or wanted

    async def _start_engine(self, memory: KVMemory, progress: socket.socket) -> None:
        self._engine_ready = asyncio.get_running_loop().create_future()
        core = self._core
        arguments = child_config(
            folder=self._card.folder,
            role=core.registration.role,
            dtype=core.registration.fingerprint.dtype,
            max_model_len=core.registration.max_model_len,
            engine=self._config.engine,
            tier=self._config.tier,
            geometry=core.geometry,
            trust_remote_code=self._config.model.trust_remote_code,
        )
        fds = (memory.fd, progress.fileno())
        positional = [str(fds[0]), str(fds[1]), arguments]
        await self._engine.start("services.engine.child", positional, pass_fds=fds, env=CHILD_ENV)
        self._core.send_engine = self._engine.send
        try:
            ready = await asyncio.wait_for(self._engine_ready, ENGINE_START_S)
        except TimeoutError:
            raise WorkerLost(f"the engine did not load the model within {ENGINE_START_S:.0f} s") from None
        note = f" ({ready.path_note})" if ready.path_note else ""
        _log.info("the engine computes %s by %s, attention %s%s", ready.dtype, ready.path, ready.attention, note)
        self._core.registration.pid = ready.pid
        self._core.registration.hidden_size = ready.hidden_size
        self._core.last_progress_s = self._core.clock()

    def _on_engine(self, message: Any) -> None:
        if isinstance(message, m.EngineReady):
            assert self._engine_ready is not None
            if not self._engine_ready.done():
                self._engine_ready.set_result(message)
        else:
            self._core.on_engine(message)

    def _on_engine_exit(self, code: int) -> None:
        if self._stopping:
            return
        reason = f"the engine process ended with code {code}; its log says why"
        if self._engine_ready is not None and not self._engine_ready.done():
            self._engine_ready.set_exception(WorkerLost(reason))
            return
        self._on_lost(reason)
        self._core.spawn(self._core.fail_all(RequestError(ErrorCode.WORKER_LOST, reason)), "fail-all")

    def _on_transfer_exit(self, code: int) -> None:
        if self._stopping or self._transfer is None:
            return
        _log.error("the transfer process ended with code %d", code)
        self._core.transfer_failures[FailureKind.PROCESS] += 1
        self._transfer = None
        self._core.send_transfer = lambda _message: None
        self._core.transfer_up.clear()
        self._core.role.on_transfer_lost()
        now = self._core.clock()
        self._restarts = [x for x in self._restarts if now - x < 60] + [now]
        if len(self._restarts) > TRANSFER_RESTARTS:
            self._on_lost(f"the transfer process ended {len(self._restarts)} times within a minute")
            return
        self._core.spawn(self._restart_transfer(), "restart-transfer")

    async def _restart_transfer(self) -> None:
        try:
            assert self._memory is not None
            assert self._progress is not None
            await self._start_transfer(self._memory, self._progress[1])
        except (WorkerLost, OSError) as exc:
            self._on_lost(f"the transfer process could not be started again: {exc}")
        else:
            self._core.role.on_transfer_restarted()
            self._core.transfer_up.set()
