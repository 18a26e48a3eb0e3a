"""One link to one worker: Attach, and again after a break.

                      ┌───────────────── described, attached ────────────────┐
    CONNECTING ───────┴──► ATTACHED ──broken──► GRACE ──2 s, or a new epoch──► LOST ──┐
        ▲                     ▲                   │                                   │
        │                     └─────attached──────┘◄──────────── retries ─────────────┘
        └─ refused by the owner (another secret, an id in use): tried again, never attached

A refused connection ends the grace at once: a worker listens as long as it lives.

The stream's messages are numbered. A re-attach within the grace names the last number handled and goes on from there;
after a loss everything starts over, since the requests of this worker were failed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import grpc
import grpc.aio

from services.protocol.auth import channel
from services.protocol.errors import RequestError
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.protocol.tasks import end
from services.protocol.version import PROTOCOL_VERSION
from services.router.calls import WorkerCalls
from services.router.turnstile import parts

GRACE_S = 2.0
"""How long a broken stream may be before its requests fail."""
ACK_EVERY_MESSAGES = 64
ACK_EVERY_S = 1.0
DESCRIBE_TIMEOUT_S = 2.0
RETRY_MIN_S, RETRY_MAX_S = 0.1, 1.0
SILENT = "silent"
REFUSED = "Connection refused"

_log = logging.getLogger("pdray.router.links")


class LinkState(StrEnum):
    CONNECTING = "connecting"
    ATTACHED = "attached"
    GRACE = "grace"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who the router is to its workers; the epoch is new for each process start."""

    router_id: str
    epoch: str


class LinkOwner(Protocol):
    """Called on the event loop; must not block."""

    def may_attach(self, link: Link, registration: worker_pb2.Registration) -> str:
        """ "" to attach, else why not."""
        ...

    def on_attached(self, link: Link) -> None: ...
    def on_message(self, link: Link, message: worker_pb2.WorkerMessage) -> None: ...
    def on_detached(self, link: Link) -> None:
        """The stream broke; the grace runs."""
        ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The requests of this worker must be given up."""
        ...


class _Broken(Exception):
    """This session is over."""


class Link:
    """Start it once, stop it once. `calls` may be used in any state; they fail fast where nobody answers."""

    def __init__(
        self,
        address: str,
        identity: RouterIdentity,
        secret: str,
        owner: LinkOwner,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.registration = worker_pb2.Registration()
        self.last_error = "not reached yet"
        self.changed_s = clock()
        self.described_s = -1e9  # when the worker last said who it is
        self._identity = identity
        self._secret = secret
        self._owner = owner
        self._silence_s = silence_s
        self._clock = clock
        self._last_seq = 0
        self._acked_seq = 0
        self._heard = 0  # messages of this session
        self._ack = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._stub: Any = None

    @property
    def worker_id(self) -> str:
        return self.registration.worker_id

    @property
    def epoch(self) -> str:
        return self.registration.epoch

    @property
    def calls(self) -> WorkerCalls:
        return WorkerCalls(self._stub, self.worker_id or self.address)

    def start(self) -> None:
        self._channel = channel(self.address, self._secret)
        make_stub: Any = worker_pb2_grpc.WorkerStub
        self._stub = make_stub(self._channel)
        self._task = asyncio.create_task(self._run(), name=f"link-{self.address}")

    async def stop(self) -> None:
        """Ends the stream and closes the channel; the owner hears nothing more."""
        self._stopped = True  # grpc.aio may turn a cancellation of `write` into an InvalidStateError
        self._cancel_grace()
        if self._task is not None:
            await end(self._task)
        if self._channel is not None:
            await self._channel.close(None)

    async def _run(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            error = await self._try_session()
            if self._stopped:
                return
            if self.state is LinkState.ATTACHED:
                pause_s = RETRY_MIN_S
                self._detach(error)
            elif error != self.last_error:
                _log.info("%s: %s", self.address, error)
            self.last_error = error
            if self.state is LinkState.GRACE and REFUSED in error:
                self._lose(f"{self.worker_id} is lost: nobody listens at {self.address}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _try_session(self) -> str:
        """Why it ended."""
        try:
            await self._session()
        except _Broken as exc:
            return str(exc)
        except RequestError as exc:
            return exc.message
        except grpc.aio.AioRpcError as exc:
            return f"{exc.code().name}: {exc.details()}"
        except Exception as exc:  # the edge of the process: no message of a worker may end the link to it
            _log.exception("a message of %s was not understood", self.address)
            return f"a message was not understood: {exc!r}"
        return "ended"

    async def _session(self) -> None:
        """Describe, attach, and read until the stream breaks. Raises _Broken, RequestError or AioRpcError."""
        registration = await self.calls.describe(DESCRIBE_TIMEOUT_S)
        self.described_s = self._clock()
        if refusal := self._owner.may_attach(self, registration):
            raise _Broken(refusal)
        if self.state is LinkState.GRACE and registration.epoch != self.epoch:
            self._lose(f"{self.worker_id} came back as another process")
        if self.state is not LinkState.GRACE:
            self._last_seq = self._acked_seq = 0
        self.registration = registration
        call = self._stub.Attach()
        acks: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                await call.write(self._router_message())
            acks = asyncio.create_task(self._acknowledge(call), name=f"acks-{self.address}")
            await self._read(call)
        except TimeoutError:
            raise _Broken(f"{SILENT} for {self._silence_s:g} s") from None
        except asyncio.InvalidStateError as exc:
            raise _Broken(f"the stream ended: {exc}") from None
        finally:
            if acks is not None:
                acks.cancel()
                await asyncio.gather(acks, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any) -> None:
        self._heard = 0
        while True:
            async with asyncio.timeout(self._silence_s):
                message = await call.read()
            if not isinstance(message, worker_pb2.WorkerMessage):  # grpc.aio.EOF
                raise _Broken("the worker closed the stream")
            if not self._heard:
                self._check_first(message)
            self._heard += 1
            if message.seq:
                self._count(message.seq)
            is_first = True
            for part in parts(message):
                if not is_first:
                    await asyncio.sleep(0)
                is_first = False
                self._owner.on_message(self, part)

    def _check_first(self, message: worker_pb2.WorkerMessage) -> None:
        """The first message says whose stream this is; between Describe and Attach the process may have changed."""
        theirs = message.registration
        if (theirs.worker_id, theirs.epoch) != (self.worker_id, self.epoch):
            raise _Broken(f"the stream is of {theirs.worker_id or 'no worker'}, not of {self.worker_id} as described")
        self._cancel_grace()
        self._set(LinkState.ATTACHED)
        self._owner.on_attached(self)

    def _count(self, seq: int) -> None:
        """Messages come as n, n + 1, …; anything else means that some are gone for good."""
        gap = self._last_seq and seq != self._last_seq + 1
        self._last_seq = seq
        if gap:
            self._owner.on_lost(self, f"messages of {self.worker_id} before number {seq} are missing")
        if seq - self._acked_seq >= ACK_EVERY_MESSAGES:
            self._ack.set()

    async def _acknowledge(self, call: Any) -> None:
        """Apart from reading, so that a worker that does not read its acks cannot stop the drain."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACK_EVERY_S):
                    await self._ack.wait()
            self._ack.clear()
            if self._acked_seq != self._last_seq:
                self._acked_seq = self._last_seq
                await call.write(self._router_message())

    def _router_message(self) -> worker_pb2.RouterMessage:
        who = self._identity
        return worker_pb2.RouterMessage(
            router_id=who.router_id,
            router_epoch=who.epoch,
            last_seq=self._last_seq,
            protocol_version=PROTOCOL_VERSION,
        )

    def _detach(self, reason: str) -> None:
        """The grace begins, unless the worker greeted and then said nothing: it would do so for ever."""
        _log.warning("the stream of %s (%s) broke: %s", self.worker_id, self.address, reason)
        if self._heard == 1 and reason.startswith(SILENT):
            self._lose(f"{self.worker_id} is lost: {reason}")
            return
        self._set(LinkState.GRACE)
        self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._grace_over)
        self._owner.on_detached(self)

    def _grace_over(self) -> None:
        if self.state is LinkState.GRACE:
            self._lose(f"{self.worker_id} is lost: {self.last_error}")

    def _lose(self, reason: str) -> None:
        self._cancel_grace()
        self._set(LinkState.LOST)
        _log.warning("%s", reason)
        self._owner.on_lost(self, reason)

    def _cancel_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _set(self, state: LinkState) -> None:
        if state is not self.state:
            self.state, self.changed_s = state, self._clock()
