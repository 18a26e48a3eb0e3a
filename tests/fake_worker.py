"""A worker without an engine: the real Worker service over real gRPC, with answers that a test scripts.

By default it behaves as the real ones do: a prefill worker gives token 1, reports the hand-off and has the decode
worker repeat token 1 and go on; a mixed worker gives everything. Token i of every answer is `token(i)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from services.protocol.auth import SERVER_OPTIONS, CallAuth, sign_registration
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.model_card import ModelCard
from services.protocol.proto import worker_pb2, worker_pb2_grpc

SECRET = "test-secret"
TICK_S = 0.2
NUM_BLOCKS = 512
CARD = ModelCard(
    folder=Path("/nowhere"),
    name="fake",
    architecture="LlamaForCausalLM",
    model_fingerprint="model-a",
    tokenizer_fingerprint="tokenizer-a",
    max_model_len=4096,
    vocab_size=50_000,
    eos_token_ids=(2,),
    bos_token_id=None,
    num_layers=4,
    num_kv_heads=2,
    head_dim=8,
    native_dtype="float32",
)
"""Of the model that these workers say they serve."""
Script = Callable[["FakeWorker", worker_pb2.SubmitRequest], Awaitable[None]]


def token(index: int) -> int:
    return 1000 + index


def fingerprint(block_size: int = 16, dtype: str = "float32", **changed: Any) -> worker_pb2.Fingerprint:
    group = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8, "block_size": block_size, "dtype": dtype}
    values: dict[str, Any] = {
        "model": "model-a",
        "tokenizer": "tokenizer-a",
        "dtype": dtype,
        "block_size": block_size,
        "layout_version": 1,
        "geometry_json": json.dumps({"groups": [group], "num_blocks": [NUM_BLOCKS]}),
    }
    return worker_pb2.Fingerprint(**(values | changed))


class Cluster:
    """Fake workers that know each other, as prefill workers know their decode workers."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}

    async def add(self, worker_id: str, role: str, **options: Any) -> FakeWorker:
        worker = self.workers[worker_id] = FakeWorker(self, worker_id, role, **options)
        await worker.start()
        return worker

    @property
    def addresses(self) -> list[str]:
        return [w.address for w in self.workers.values()]

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.kill()


class FakeWorker(worker_pb2_grpc.WorkerServicer):  # type: ignore[misc]
    def __init__(
        self,
        cluster: Cluster,
        worker_id: str,
        role: str,
        *,
        epoch: str = "e1",
        fingerprint_: worker_pb2.Fingerprint | None = None,
        secret: str = SECRET,
        transport: str = "tcp",
        port: int = 0,
    ) -> None:
        self.cluster = cluster
        self.worker_id = worker_id
        self.role = role
        self.epoch = epoch
        self.secret = secret
        self.port = port
        self.address = ""
        self.registration = worker_pb2.Registration(
            worker_id=worker_id,
            role=role,
            epoch=epoch,
            fingerprint=fingerprint_ or fingerprint(),
            node="here",
            pid=4711,
            num_blocks=NUM_BLOCKS,
            max_model_len=4096,
            model_name="fake",
            transport=transport,
            hidden_size=3,
        )
        self.load = worker_pb2.Load(blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.aborts: list[tuple[str, int]] = []
        self.drops: list[tuple[str, int, list[int]]] = []  # aborts of single choices
        self.retargets: list[worker_pb2.RetargetRequest] = []
        self.hellos: list[worker_pb2.RouterMessage] = []
        self.acked = 0
        self.on_submit: Script = run_normally
        self.on_retarget: Callable[[FakeWorker, worker_pb2.RetargetRequest], Awaitable[None]] = retarget_normally
        self._kept: list[worker_pb2.WorkerMessage] = []
        self._seq = 0
        self._changed = asyncio.Condition()
        self._streams: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: grpc.aio.Server | None = None
        self.silent = False  # Attach says nothing of its own accord
        self.deaf = False  # Describe is never answered

    # --- life ---

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[CallAuth(SECRET)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.address = self.registration.address = f"127.0.0.1:{self.port}"
        self.sign()
        await self._server.start()

    async def kill(self) -> None:
        """Gone without a word."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self, epoch: str) -> None:
        """Another process on the same port."""
        await self.kill()
        self.epoch = self.registration.epoch = epoch
        self._kept.clear()
        self._seq = 0
        await self.start()

    def sign(self) -> None:
        sign_registration(self.registration, self.secret)

    def break_streams(self) -> None:
        """The connection breaks; the process lives and keeps what was not acknowledged."""
        for task in list(self._streams):
            task.cancel()

    # --- what it says ---

    async def say(self, message: worker_pb2.WorkerMessage) -> None:
        """Number, keep and send one message."""
        async with self._changed:
            self._seq += 1
            message.seq = self._seq
            message.load.CopyFrom(self.load)
            self._kept.append(message)
            self._changed.notify_all()

    async def output(
        self, request: worker_pb2.Request, position: int, *tokens: int, finish: str = "", **fields: Any
    ) -> None:
        out = worker_pb2.Output(
            request_id=request.request_id,
            position=position,
            token_ids=tokens,
            finish_reason=finish,
            **({"attempt": request.attempt} | fields),
        )
        await self.say(worker_pb2.WorkerMessage(outputs=[out]))

    async def error(self, request: worker_pb2.Request, code: ErrorCode, retryable: bool, message: str = "no") -> None:
        error = worker_pb2.Error(code=str(code), message=message, retryable=retryable)
        await self.output(request, 0, finish="error", error=error)

    async def handoff(self, request: worker_pb2.Request, state: str = "committed", **fields: Any) -> None:
        values = {"bytes": 4096, "layers": 4, "transport": "tcp", "attempt": request.attempt} | fields
        report = worker_pb2.HandoffReport(request_id=request.request_id, state=state, **values)
        await self.say(worker_pb2.WorkerMessage(handoffs=[report]))

    async def set_load(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.load, name, value)
        async with self._changed:
            self._changed.notify_all()

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the service ---

    async def Describe(self, request: Any, context: Any) -> worker_pb2.Registration:
        if self.deaf:
            await asyncio.sleep(60)
        return self.registration

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        hello = await anext(aiter(requests))
        self.hellos.append(hello)
        me = asyncio.current_task()
        assert me is not None
        self._streams.add(me)
        acks = asyncio.create_task(self._read_acks(requests))
        sent = hello.last_seq
        try:
            yield self._stamped(worker_pb2.WorkerMessage(registration=self.registration))
            while True:
                for message in [m for m in self._kept if m.seq > sent]:
                    sent = message.seq
                    yield self._stamped(message)
                async with self._changed:
                    if not any(m.seq > sent for m in self._kept):
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(TICK_S):
                                await self._changed.wait()
                if not self.silent:
                    yield self._stamped(worker_pb2.WorkerMessage(load=self.load))
        except asyncio.CancelledError:
            if context.done():
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        finally:
            self._streams.discard(me)
            acks.cancel()

    async def _read_acks(self, requests: Any) -> None:
        async for message in requests:
            self.acked = message.last_seq
            self._kept = [m for m in self._kept if m.seq > message.last_seq]

    def _stamped(self, message: worker_pb2.WorkerMessage) -> worker_pb2.WorkerMessage:
        message.worker_id, message.epoch = self.worker_id, self.epoch
        return message

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        self.submits.append(request)
        await self._run(context, self.on_submit(self, request))
        return worker_pb2.SubmitReply()

    async def Retarget(self, request: worker_pb2.RetargetRequest, context: Any) -> worker_pb2.RetargetReply:
        self.retargets.append(request)
        await self._run(context, self.on_retarget(self, request))
        return worker_pb2.RetargetReply()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        if request.choices:
            self.drops.append((request.request_id, request.attempt, list(request.choices)))
        else:
            self.aborts.append((request.request_id, request.attempt))
        return worker_pb2.AbortReply()

    async def Steps(self, request: worker_pb2.StepsRequest, context: Any) -> worker_pb2.StepsReply:
        return worker_pb2.StepsReply(json=json.dumps([{"step": 1, "decodes": 2}]))

    async def _run(self, context: Any, script: Awaitable[None]) -> None:
        try:
            await script
        except RequestError as exc:
            metadata = (("pdray-error-code", str(exc.code)),)
            await context.abort(getattr(grpc.StatusCode, exc.status.grpc), exc.message, metadata)

    def reader(self, request: worker_pb2.SubmitRequest) -> FakeWorker:
        return self.cluster.workers[request.reader.worker_id]


async def run_normally(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
    """The whole answer, at once, behind what of it exists already."""
    request = submit.request
    times = worker_pb2.StageTimes(queue_ms=1, compute_ms=2)
    if request.pools:
        state = struct.pack("<3f", len(request.prompt_ids), request.prompt_ids[0], 1)
        worker.spawn(worker.output(request, 0, finish="stop", times=times, pooled=state))
        return
    first, last = len(request.output_ids), request.sampling.max_tokens - 1
    if not submit.HasField("reader"):
        tokens = [token(i) for i in range(first, last + 1)]
        worker.spawn(worker.output(request, first, *tokens, finish="length", times=times))
        return
    await worker.output(request, first, token(first), times=times, finish="" if last > first else "length")
    if last > first:
        worker.spawn(hand_off(worker, worker.reader(submit), request))


async def hand_off(worker: FakeWorker, reader: FakeWorker, request: worker_pb2.Request) -> None:
    """Commit, then decode to max_tokens, one message for each token."""
    await worker.handoff(request)
    await decode(reader, request, start=len(request.output_ids))


async def decode(reader: FakeWorker, request: worker_pb2.Request, start: int = 0) -> None:
    last = request.sampling.max_tokens - 1
    times = worker_pb2.StageTimes(wait_ms=1, compute_ms=5)
    for i in range(start, last + 1):
        await reader.output(request, i, token(i), finish="length" if i == last else "", times=times)


async def retarget_normally(worker: FakeWorker, retarget: worker_pb2.RetargetRequest) -> None:
    """The KV goes to the new reader, which goes on from token 1."""
    request = worker_pb2.Request()
    request.CopyFrom(next(s.request for s in worker.submits if s.request.request_id == retarget.request_id))
    request.attempt = retarget.attempt
    worker.spawn(hand_off(worker, worker.cluster.workers[retarget.reader.worker_id], request))


async def accept_only(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
    """Take the request and say nothing; the test speaks for the worker."""
