"""Mooncake's TransferEngine as a transport: one engine for each peer and epoch on both sides, over the same memory.

An engine serves whoever reaches its ports, so both sides keep them shut (`kvstore.transfer.guard`) and the writer is
let in by hand, over a door (`kvstore.transfer.doorway`) that only holders of the application's secret pass:

Writer                                     Reader
    knock                              ─►  KV memory is not registered, so the engine gives nothing; ajar for the
    writer's address connect the engine's lanes by      ◄─  target, scratch address, ports
      writing to the scratch memory
    mine: the local ports of the lanes ─►  shut; nobody but these is connected? register the KV memory
                                       ◄─  sealed
    ticket?                            ─►  allowed, or not: asked once for each ticket, before its first write
    gone, once its engine is destroyed ─►  wait until the lanes' connections are closed here too
                                       ◄─  drained: nothing of this channel can land any more

The lanes live as long as the channel. Somebody who is connected and was not named ends the engine. A write is done
when the reader's engine acknowledged that it applied it. Destroying an engine is the only fence; the other engines of
this memory go on undisturbed.

With rdma the same rules hold, but memory is registered before the knock (its keys travel in Mooncake's own handshake)
and connections of queue pairs cannot be listed. It has not run on hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import threading
import time

from kvstore.errors import KVError, TransferError, TransportUnavailable
from kvstore.transfer.base import Peer, Region
from kvstore.transfer.doorway import Doorway, Segments
from kvstore.transfer.gate import Gate
from kvstore.transfer.guard import Address
from kvstore.transfer.handshake import Segment, connect_and_prove
from kvstore.transfer.mooncake_channel import MooncakeChannel
from kvstore.transfer.mooncake_engine import GuardedEngine, check_filter, load_engine_class
from kvstore.transfer.options import TransportOptions
from kvstore.transfer.talk import Talk

SCRATCH_BYTES = 1 << 16
WATCH_S = 1.0
DRAIN_S = 1.5
KNOCK_S = 5.0
SETTLE_S = 0.005
"""A segment that passed the filter just before it was shut is processed long before this is over."""

log = logging.getLogger("pdray.transfer")


class MooncakeListener:
    """One peer's way into our memory: a door, and an engine behind it."""

    def __init__(self, region: Region, doorway: Doorway, options: TransportOptions) -> None:
        self._region = region
        self._doorway = doorway
        self._options = options
        self._engine = self._new_engine()
        self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        self._serving = threading.Lock()  # one writer at a time
        self._gate = Gate()  # a ticket that the writer asked for counts as landing until the writer is gone
        self._named: set[Address] = set()
        self._is_closing = False

    def open(self, again: str) -> None:
        self._engine.open()
        try:
            self._prepare(self._engine)
            self._doorway.open(self._serve, again)
        except BaseException:
            self._engine.close()
            raise

    @property
    def segment(self) -> str:
        return self._doorway.segment

    def allow(self, ticket_id: str) -> None:
        self._gate.allow(ticket_id)

    def revoke(self, ticket_id: str) -> bool:
        """True where the writer has not asked for the ticket since it connected, or is not connected any more."""
        self._gate.forbid(ticket_id)
        return not self._gate.is_landing(ticket_id) or self._engine.wait_unconnected(0)

    def close(self) -> None:
        self._is_closing = True
        self._doorway.close(2.0)
        self._engine.close()
        if not self._engine.wait_unconnected(DRAIN_S):
            raise TransferError("connections to a destroyed engine are left")

    def _new_engine(self) -> GuardedEngine:
        return GuardedEngine(self._options.host, self._options.protocol, self._options.device)

    def _prepare(self, engine: GuardedEngine) -> None:
        engine.register(Region(ctypes.addressof(self._scratch), SCRATCH_BYTES))
        if self._options.protocol == "rdma":
            engine.register(self._region)

    def _replace_engine(self) -> None:
        """Fence: end whoever is connected, and start over with nobody."""
        self._engine.close()
        engine = self._new_engine()
        engine.open()
        self._prepare(engine)
        self._engine = engine

    def _serve(self, sock: socket.socket, key: bytes) -> None:
        """Talk to one writer until it leaves."""
        talk = Talk(sock, key, is_writer=False)
        if not self._serving.acquire(timeout=DRAIN_S):
            raise TransferError("another connection of this writer is being served")
        try:
            self._let_in(talk, sock.getpeername()[0])
            while not self._is_closing:
                if not talk.wait(WATCH_S):
                    self._look_for_strangers()
                    continue
                message = talk.receive(KNOCK_S)
                if "ticket" in message:
                    talk.send({"allowed": self._gate.enter(str(message["ticket"]))})
                elif "gone" in message:
                    talk.send({"drained": self._engine.wait_unconnected(DRAIN_S)})
                    return
        finally:
            self._shut()
            self._serving.release()

    def _let_in(self, talk: Talk, address: str) -> None:
        if talk.receive(KNOCK_S).get("knock") != self._options.protocol:
            raise TransferError(f"the writer does not use {self._options.protocol}")
        self._shut()
        if not self._engine.wait_unconnected(DRAIN_S):
            self._replace_engine()
        self._gate.leave_all()
        guard = self._engine.guard
        assert guard is not None
        guard.set_ajar(address)
        try:
            talk.send(
                {
                    "target": self._engine.target,
                    "ports": sorted(self._engine.ports),
                    "scratch": ctypes.addressof(self._scratch),
                    "memory": self._region.address,
                    "num_bytes": self._region.num_bytes,
                }
            )
            mine = talk.receive(KNOCK_S).get("mine")
        finally:
            guard.shut()
        if not isinstance(mine, list):
            raise TransferError("the writer did not name its connections")
        self._named = {(str(address), int(port)) for address, port in mine}
        time.sleep(SETTLE_S)
        self._look_for_strangers()
        self._engine.register(self._region)
        self._look_for_strangers()
        talk.send({"sealed": True})

    def _look_for_strangers(self) -> None:
        """Raises TransferError, after ending the engine, where somebody is connected whom the writer did not name."""
        guard = self._engine.guard
        assert guard is not None
        strangers = guard.connected() - self._named
        if strangers:
            log.error("%s connected to mooncake without being named", sorted(strangers))
            self._replace_engine()
            raise TransferError(
                f"{sorted(strangers)} connected to mooncake without being named; its engine was replaced"
            )

    def _shut(self) -> None:
        """Without a writer that we know of, the engine gives nothing but its scratch memory."""
        if self._options.protocol != "rdma":
            with contextlib.suppress(KVError):  # closed meanwhile: it gives nothing at all
                self._engine.unregister(self._region)


class MooncakeTransport:
    name = "mooncake"

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._segments = Segments()

    def check(self) -> None:
        """Raises TransportUnavailable where mooncake cannot be loaded here, or could not be guarded."""
        if not self._options.secret:
            raise TransportUnavailable(
                "transport mooncake needs the application's secret; set secret in the configuration"
            )
        load_engine_class()
        check_filter()

    def listen(self, region: Region, peer: Peer) -> MooncakeListener:
        doorway = Doorway(self.name, self._options.host, self._options.secret, peer)
        listener = MooncakeListener(region, doorway, self._options)
        listener.open(self._segments.get(peer))
        self._segments.keep(peer, listener.segment)
        return listener

    def connect(self, region: Region, peer: Peer, segment: str) -> MooncakeChannel:
        sock, key = connect_and_prove(Segment.from_text(segment, self.name), self._options.secret)
        engine = GuardedEngine(self._options.host, self._options.protocol, self._options.device)
        channel = MooncakeChannel(region, engine, Talk(sock, key, is_writer=True), self._options.protocol)
        channel.open()
        return channel
