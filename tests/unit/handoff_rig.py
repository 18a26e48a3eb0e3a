"""A prefill and a decode worker whose engines and transfers are scripts of the test; all between them is real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from kvstore.geometry import KVGeometry, KVGroup
from kvstore.transfer import messages as t
from services import config as settings
from services.decode.reader import Reader
from services.engine import messages as m
from services.prefill.writer import Writer
from services.protocol.auth import SERVER_OPTIONS, CallAuth
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.worker.core import WorkerCore
from services.worker.role import Role
from services.worker.service import WorkerService

GROUP = KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
GEOMETRY = KVGeometry(groups=(GROUP,), num_blocks=(64,))
ROUTER = ("router", "r1")
M = TypeVar("M")


def config(**overrides: Any) -> settings.ServeConfig:
    base = {"secret": "s", "transfer.lease_ms": 400, "transfer.lease_renew_ms": 100}
    return settings.load(overrides=base | overrides, environ={})


def left_out(writer_id: str, writer_epoch: str, reader_epoch: str, number: int = 1 << 40) -> worker_pb2.LeaseRequest:
    """A writer's lease list, for this process of its reader, that names no ticket."""
    return worker_pb2.LeaseRequest(
        writer_id=writer_id, writer_epoch=writer_epoch, reader_epoch=reader_epoch, number=number
    )


@dataclass
class Half:
    """One worker: what it sent to its children, and the server it answers on."""

    core: WorkerCore
    server: grpc.aio.Server
    engine: list[Any] = field(default_factory=list)
    transfer: list[Any] = field(default_factory=list)

    async def sent(self, kind: type[M], where: str = "transfer", skip: int = 0) -> M:
        """The next message of this kind that the worker sent, after ``skip`` of them."""
        async with asyncio.timeout(5):
            while True:
                found = [x for x in getattr(self, where) if isinstance(x, kind)]
                if len(found) > skip:
                    return found[skip]
                await asyncio.sleep(0.005)

    def none_sent(self, kind: type[Any], where: str = "transfer") -> bool:
        return not any(isinstance(x, kind) for x in getattr(self, where))

    def outputs(self) -> list[worker_pb2.Output]:
        return [o for x in self._messages() for o in x.outputs]

    def reports(self) -> list[worker_pb2.HandoffReport]:
        return [o for x in self._messages() for o in x.handoffs]

    def arrows(self) -> list[str]:
        """Names of the timeline's events so far."""
        return [o.name for x in self._messages() for o in x.events]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    def _messages(self) -> list[worker_pb2.WorkerMessage]:
        self.core.hub.flush()
        box = self.core.hub._outboxes.get(ROUTER)
        return list(box.kept) if box else []


async def start_half(
    role: str, make: Callable[[WorkerCore], Role], conf: settings.ServeConfig, epoch: str, **fingerprint: Any
) -> Half:
    values = {"model": "m", "tokenizer": "t", "dtype": "float32", "block_size": 16, "layout_version": 1} | fingerprint
    registration = worker_pb2.Registration(
        worker_id=f"{role}-0",
        role=role,
        epoch=epoch,
        transport="tcp",
        max_model_len=1024,
        fingerprint=worker_pb2.Fingerprint(geometry_json=json.dumps(GEOMETRY.to_dict()), **values),
    )
    core = WorkerCore(conf, registration, make)
    server = grpc.aio.server(interceptors=[CallAuth("s")], options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(core), server)
    registration.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    half = Half(core, server)
    core.send_engine = half.engine.append
    core.send_transfer = half.transfer.append
    return half


@dataclass
class Pair:
    p: Half
    d: Half

    async def stop(self) -> None:
        for half in (self.p, self.d):
            await half.server.stop(0)
            await half.core.stop()

    # --- the path of one request, a step at a time ---

    async def submit(self, request_id: str = "r", attempt: int = 0, remaining_ms: int = 20_000, n: int = 1) -> str:
        d = self.d.core.registration
        await self.p.core.submit(
            worker_pb2.SubmitRequest(
                request=worker_pb2.Request(
                    request_id=request_id,
                    attempt=attempt,
                    router_id=ROUTER[0],
                    router_epoch=ROUTER[1],
                    prompt_ids=range(1, 41),
                    remaining_ms=remaining_ms,
                    root_digest=b"root",
                    sampling=worker_pb2.Sampling(max_tokens=8),
                    n=n,
                ),
                reader=worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address),
            )
        )
        return f"{request_id}.{attempt}"

    async def start_prefill(self, seq_id: str) -> None:
        await self.p.sent(m.AddSequence, "engine")
        self.p.core.on_engine(m.PrefillStarted(seq_id=seq_id, block_ids=(0, 1, 2), cached_blocks=0))

    async def grant(self, seq_id: str) -> t.OpenTicket:
        """D's engine and transfer answer; P's transfer gets its ticket."""
        await self.d.sent(m.ReserveSequence, "engine")
        listener = await self.d.sent(t.OpenListener)
        self.d.core.role.on_transfer(
            t.ListenerReady(worker_id=listener.worker_id, epoch=listener.epoch, segment="segment")
        )
        self.d.core.on_engine(m.Reserved(seq_id=seq_id, block_ids=(10, 11, 12), cached_blocks=0))
        return await self.p.sent(t.OpenTicket)

    def token(self, seq_id: str, token: int = 7, finish: str = "") -> None:
        output = m.SequenceOutput(seq_id=seq_id, position=0, token_ids=(token,), finish_reason=finish, cached_tokens=16)
        self.p.core.on_engine(m.StepDone(outputs=(output,), stored=(), removed=(), stats=m.Stats()))

    def first_tokens(self, seq_id: str, tokens: dict[int, int], ended: Collection[int] = ()) -> None:
        """Token 1 of each choice, in one step of P's engine."""
        outputs = tuple(
            m.SequenceOutput(
                seq_id=seq_id, position=0, token_ids=(token,), choice=i, finish_reason="stop" if i in ended else ""
            )
            for i, token in tokens.items()
        )
        self.p.core.on_engine(m.StepDone(outputs=outputs, stored=(), removed=(), stats=m.Stats()))

    def decoded(self, seq_id: str, choice: int, position: int, token: int, finish: str = "") -> None:
        """One token of one choice, in a step of D's engine."""
        output = m.SequenceOutput(
            seq_id=seq_id, position=position, token_ids=(token,), choice=choice, finish_reason=finish
        )
        self.d.core.on_engine(m.StepDone(outputs=(output,), stored=(), removed=(), stats=m.Stats()))

    def pushed(self, ticket_id: str, extents: tuple[t.Extent, ...] | None = None) -> None:
        whole = tuple(t.Extent(layer=i, block=10, count=3, digest=i + 1) for i in range(2))
        self.p.core.role.on_transfer(t.Pushed(ticket_id=ticket_id, extents=extents or whole, num_bytes=4096, layers=()))

    async def verified(self, bad: tuple[t.Extent, ...] = (), skip: int = 0) -> None:
        verify = await self.d.sent(t.Verify, skip=skip)
        self.d.core.role.on_transfer(t.Verified(ticket_id=verify.ticket_id, bad=bad))


async def start_pair(conf: settings.ServeConfig | None = None, **d_fingerprint: Any) -> Pair:
    conf = conf or config()
    return Pair(
        p=await start_half("prefill", Writer, conf, "pe"),
        d=await start_half("decode", lambda core: Reader(core, takes_prompts=False), conf, "de", **d_fingerprint),
    )
