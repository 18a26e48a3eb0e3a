"""Workers in one process and in virtual time: real roles, engines, schedulers, pools and writer sessions, whose network
and wire misbehave as they are told to.

Simulated are the gRPC calls (late, lost on either way, delivered again), the wire (`handoff_wire`) and the model, which
writes into each block a tag of the tokens that it stands for, and looks at these tags before it decodes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from kvstore.blocks import block_names
from services import config as settings
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.protocol.status import trailing_of
from tests.property.handoff_node import BLOCK, ROOT, ROUTER, Node
from tests.property.handoff_wire import Listener, Violation, Weather
from tests.unit.virtual_loop import VirtualLoop

MEMORY_S = 5.0
"""How long the network may hold a call back."""


@dataclass
class Calls:
    """What happens to calls between workers now: shares of them."""

    lost: float = 0.0  # before they arrive
    unanswered: float = 0.0  # handled, and the answer is lost
    late: float = 0.0  # handled after the caller gave up
    delay_s: float = 0.01


class Stub:
    """Another worker's service as one worker sees it."""

    def __init__(self, world: HandoffWorld, caller: Node, address: str) -> None:
        self._world, self._caller, self._address = world, caller, address

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, timeout: float) -> Any:
            copy = type(request).FromString(request.SerializeToString())
            return await self._world.call(self._caller, self._address, method, copy, timeout)

        return call


def failed(code: grpc.StatusCode, error: RequestError | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*(trailing_of(error) if error else ()))
    text = error.message if error else code.name
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text, debug_error_string="")


@dataclass
class Attempt:
    """One attempt of one request, as the router knows it."""

    request_id: str
    attempt: int
    prefill: str
    decode: str
    prompt: list[int]
    failed_over: bool = False  # the prefill worker waits for another reader
    tokens: dict[int, int] = field(default_factory=dict)


class Errors(logging.Handler):
    """Whatever the product logs as broken is a violation here."""

    def __init__(self, world: HandoffWorld) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._world.violate(self.format(record))


class HandoffWorld:
    def __init__(self, seed: int, *, asks_once: bool) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(lambda _loop, context: self.violate(f"{context}"))
        self.rng, self.asks_once = random.Random(seed), asks_once
        self.weather, self.calls = Weather(), Calls()
        self.cuts: set[frozenset[str]] = set()
        self.listeners: dict[str, Listener] = {}
        self.violations: list[str] = []
        self.attempts: dict[str, Attempt] = {}  # by request id, the highest
        self.history: list[tuple[Node, str, str, Any]] = []  # node, its epoch, method, request
        self._called_s: list[float] = []
        self.commits = 0
        self.arrows: set[tuple[str, str]] = set()  # (side, name) of those walked so far
        self._owners: dict[str, str] = {}  # ticket id -> sequence at the reader
        self._sources: dict[str, str] = {}  # ticket id -> sequence at the writer
        self.config = settings.load(overrides={"secret": "s"}, environ={})
        self._errors = Errors(self)
        logging.getLogger("pdray").addHandler(self._errors)
        self.nodes: dict[str, Node] = {}
        self._token_hex, ids = secrets.token_hex, itertools.count()
        secrets.token_hex = lambda num_bytes=None: f"{next(ids):016x}"  # so that a seed is all that a life depends on
        self.run_for(0.0, self._start())

    async def _start(self) -> None:
        self.nodes = {n: Node(self, "prefill" if n == "P" else "decode", n) for n in ("P", "D0", "D1")}

    def run_for(self, seconds: float, first: Any = None) -> None:
        async def main() -> None:
            if first is not None:
                await first
            await asyncio.sleep(seconds)

        self.loop.run_until_complete(main())

    def do(self, act: Any) -> None:
        """Call it on the loop."""

        async def main() -> None:
            act()
            await asyncio.sleep(0)

        self.run_for(0.0, main())

    def close(self) -> None:
        secrets.token_hex = self._token_hex
        logging.getLogger("pdray").removeHandler(self._errors)
        for node in self.nodes.values():
            if node.is_alive:
                node.crash()
        self.run_for(0.01)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run_for(0.01)
        self.loop.close()
        asyncio.set_event_loop(None)

    # --- what the wire asks ---

    def violate(self, text: str) -> None:
        self.violations.append(f"{self.loop.time():.3f}: {text}")

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.cuts

    def owner_of(self, ticket_id: str) -> str:
        return self._owners[ticket_id]

    def source_of(self, ticket_id: str) -> str:
        return self._sources[ticket_id]

    # --- calls between workers ---

    def stub(self, caller: Node, address: str) -> Stub:
        return Stub(self, caller, address)

    async def call(self, caller: Node, address: str, method: str, request: Any, timeout: float) -> Any:
        if method == "Reserve":
            self._owners[request.ticket_id] = f"{request.request.request_id}.{request.request.attempt}"
            ticket = caller.core.role._tickets[request.ticket_id]  # type: ignore[attr-defined]
            self._sources[request.ticket_id] = ticket.live.seq_id
        if method == "Pull":
            self._owners[request.ticket_id] = f"{request.request_id}.{request.attempt}"
            self._sources[request.ticket_id] = f"pull.{request.ticket_id}"
        luck, calls = self.rng.random(), self.calls
        await asyncio.sleep(self.rng.uniform(0, calls.delay_s))
        node = self.nodes[address]
        if not node.is_alive or not caller.is_alive or self.is_cut(caller.name, address) or luck < calls.lost:
            raise failed(grpc.StatusCode.UNAVAILABLE)
        self.history.append((node, node.epoch, method, request))
        self._called_s.append(self.loop.time())
        if luck < calls.lost + calls.late:
            self.loop.call_later(timeout + self.rng.uniform(0, 2), self.deliver, node, node.epoch, method, request)
            await asyncio.sleep(timeout)
            raise failed(grpc.StatusCode.DEADLINE_EXCEEDED)
        task = asyncio.ensure_future(self._serve(node, method, request))
        try:
            async with asyncio.timeout(timeout):
                reply = await asyncio.shield(task)
                await asyncio.sleep(self.rng.uniform(0, calls.delay_s))
        except TimeoutError:
            task.cancel()
            raise failed(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        except asyncio.CancelledError:
            task.cancel()
            raise
        unanswered = luck < calls.lost + calls.late + calls.unanswered
        if unanswered or not node.is_alive or self.is_cut(caller.name, address):
            raise failed(grpc.StatusCode.UNAVAILABLE)
        return reply

    def recent(self) -> list[tuple[Node, str, str, Any]]:
        """Calls of the last seconds; the network forgets older ones."""
        now_s = self.loop.time()
        return [x for x, at_s in zip(self.history, self._called_s, strict=True) if now_s - at_s < MEMORY_S][-8:]

    def deliver(self, node: Node, epoch: str, method: str, request: Any) -> None:
        """A call that nobody waits for, which its server handles all the same, unless it is another process now."""
        if node.is_alive and node.epoch == epoch:
            task = self.loop.create_task(self._serve(node, method, request, is_stray=True))
            if method in ("Reserve", "Pull"):
                self.loop.call_later(self.rng.uniform(0, 0.5), task.cancel)

    async def _serve(self, node: Node, method: str, request: Any, is_stray: bool = False) -> Any:
        role = node.core.role
        try:
            if method == "Lease":
                return role.lease(request)
            names = {"Reserve": "reserve", "Commit": "commit", "CloseTicket": "close_ticket"}
            names |= {"Pull": "pull", "EndPull": "end_pull"}
            return await getattr(role, names[method])(request)
        except RequestError as exc:
            if is_stray:
                return None
            raise failed(grpc.StatusCode[exc.status.grpc], exc) from None
        except Exception as exc:  # the edge of a process
            self.violate(f"{method} on {node.name}: {exc!r}")
            raise failed(grpc.StatusCode.INTERNAL) from None

    # --- the router ---

    def submit(self, prompt: Sequence[int], decode: str, max_tokens: int, remaining_ms: int, source: str = "") -> None:
        """``source``: the worker that is said to hold KV of the whole prompt."""
        request_id = f"r{len(self.attempts)}"
        node, d = self.nodes["P"], self.nodes[decode].core.registration
        self.attempts[request_id] = Attempt(request_id, 0, "P", decode, list(prompt))
        request = worker_pb2.Request(
            request_id=request_id, attempt=0, router_id=ROUTER[0], router_epoch=ROUTER[1], prompt_ids=prompt,
            remaining_ms=remaining_ms, root_digest=ROOT, block_names=b"".join(block_names(prompt, BLOCK, ROOT)),
            sampling=worker_pb2.Sampling(max_tokens=max_tokens, top_p=1.0),
        )  # fmt: skip
        reader = worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address)
        holder = None
        if source:
            s = self.nodes[source].core.registration
            holder = worker_pb2.Source(worker_id=source, epoch=s.epoch, address=s.address, blocks=len(prompt) // BLOCK)
        self._ask(node.core.submit(worker_pb2.SubmitRequest(request=request, reader=reader, source=holder)))

    def retarget(self, request_id: str, decode: str) -> None:
        attempt, d = self.attempts[request_id], self.nodes[decode].core.registration
        attempt.attempt, attempt.decode, attempt.failed_over = attempt.attempt + 1, decode, False
        reader = worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address)
        request = worker_pb2.RetargetRequest(request_id=request_id, attempt=attempt.attempt, reader=reader)
        self._ask(self.nodes["P"].core.role.retarget(request))

    def abort(self, request_id: str, where: str) -> None:
        self._ask(self.nodes[where].core.abort(request_id, self.attempts[request_id].attempt, "the client left"))

    def _ask(self, call: Any) -> None:
        async def main() -> None:
            try:
                await call
            except RequestError as exc:
                if exc.code is ErrorCode.INTERNAL:
                    self.violate(f"the router is told: {exc.message}")

        self.run_for(0.0, main())

    def on_router_message(self, node: Node, message: worker_pb2.WorkerMessage) -> None:
        for event in message.events:
            detail = json.loads(event.detail_json or "{}")
            if "side" in detail:
                self.arrows.add((detail["side"], event.name))
        for report in message.handoffs:
            attempt = self.attempts[report.request_id]
            if report.state == "failed" and report.error.retryable and report.attempt == attempt.attempt:
                attempt.failed_over = True
        for output in message.outputs:
            attempt = self.attempts[output.request_id]
            for position, token in enumerate(output.token_ids, output.position):
                if attempt.tokens.setdefault(position, token) != token:
                    self.violate(f"{output.request_id} has two tokens at {position}")

    # --- the end ---

    def heal(self) -> None:
        self.weather, self.calls, self.cuts = Weather(), Calls(), set()
        for node in self.nodes.values():
            if not node.is_alive:
                node.start()

    def check(self) -> None:
        if self.violations:
            raise Violation("\n".join(self.violations[:5]))
        for node in self.nodes.values():
            if node.is_alive:
                node.check()

    def settle(self, limit_s: float = 120.0) -> None:
        """Without faults every ticket ends, and nobody holds a block but for the cache."""
        self.do(self.heal)
        until_s = self.loop.time() + limit_s
        while any(node.leftovers() for node in self.nodes.values()) and self.loop.time() < until_s:
            self.run_for(1.0)
            self.check()
        left = {node.name: node.leftovers() for node in self.nodes.values() if node.leftovers()}
        assert not left, f"after {limit_s:.0f} quiet seconds: {left}"
