"""The built-in transport: one authenticated TCP connection for each pair, frames that land straight in the reader's
memory.

Writer (`kvstore.transfer.tcp_channel`)          Reader
    connect, prove the secret                ─►  prove it back (`kvstore.transfer.handshake`)
    header(sequence, offset, bytes, ticket)  ─►  check and sequence right? ticket allowed? inside the memory?
    payload                                  ─►  received into the memory; into the bin where the answer is no
                                             ◄─  ack(sequence, landed or refused)
    half-close                               ─►  finish or drop the last frame, close
                                             ◄─  end of stream: nothing of this channel can land any more

A header's check is keyed by the connection, so nobody can add a frame. Payload is not authenticated (its digest comes
with the commit) and nothing is encrypted: like Mooncake's, these ports belong on a trusted network.
"""

from __future__ import annotations

import ctypes
import socket

from kvstore.errors import TransportUnavailable
from kvstore.transfer import frames
from kvstore.transfer.base import Peer, Region
from kvstore.transfer.doorway import Doorway, Segments
from kvstore.transfer.frames import Frame
from kvstore.transfer.gate import Gate
from kvstore.transfer.handshake import Segment, connect_and_prove
from kvstore.transfer.options import TransportOptions
from kvstore.transfer.tcp_channel import TcpChannel

CLOSE_S = 2.0
_BIN_BYTES = 1 << 16


def map_region(region: Region) -> memoryview:
    """The region as writable bytes, without a copy; valid while the memory is mapped."""
    return memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")


class TcpListener:
    """One peer's way into our memory."""

    def __init__(self, region: Region, doorway: Doorway) -> None:
        self._memory = map_region(region)
        self._doorway = doorway
        self._gate = Gate()

    def open(self, again: str) -> None:
        self._doorway.open(self._receive, again)

    @property
    def segment(self) -> str:
        return self._doorway.segment

    def allow(self, ticket_id: str) -> None:
        self._gate.allow(frames.ticket_key(ticket_id))

    def revoke(self, ticket_id: str) -> bool:
        """Waits for the frame that is landing; a writer that stalls in the middle of one loses its connection."""
        ticket = frames.ticket_key(ticket_id)
        self._gate.forbid(ticket)
        if self._gate.wait_empty(ticket, CLOSE_S / 2):
            return True
        self._doorway.end_connections()
        return self._gate.wait_empty(ticket, CLOSE_S / 2)

    def close(self) -> None:
        self._doorway.close(CLOSE_S)

    def _receive(self, sock: socket.socket, key: bytes) -> None:
        """Take frames until the stream ends. Raises TransferError on a frame that the writer cannot have sent."""
        header = bytearray(frames.HEADER_BYTES)
        sequence = 1
        while _fill(sock, memoryview(header)):
            if not self._take(sock, frames.unpack(bytes(header), key, sequence)):
                return
            sequence += 1

    def _take(self, sock: socket.socket, frame: Frame) -> bool:
        """Receive one payload and acknowledge it; False: the stream ended within it."""
        landed = False
        if frame.offset + frame.num_bytes <= len(self._memory) and self._gate.enter(frame.ticket):
            try:
                landed, is_whole = self._land(sock, frame)
            finally:
                self._gate.leave(frame.ticket)
        else:
            is_whole = _discard(sock, frame.num_bytes)
        if is_whole:
            sock.sendall(frames.ACK.pack(frame.sequence, frames.LANDED if landed else frames.REFUSED))
        return is_whole

    def _land(self, sock: socket.socket, frame: Frame) -> tuple[bool, bool]:
        """(all of it landed, all of it came): when its ticket is revoked meanwhile, the rest goes into the bin."""
        target = self._memory[frame.offset : frame.offset + frame.num_bytes]
        received = 0
        while received < frame.num_bytes:
            if not self._gate.is_allowed(frame.ticket):
                return False, _discard(sock, frame.num_bytes - received)
            count = sock.recv_into(target[received:])
            if not count:
                return False, False
            received += count
        return True, True


class TcpTransport:
    name = "tcp"

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._segments = Segments()

    def check(self) -> None:
        """Raises TransportUnavailable without a secret: anybody on this machine could write into the memory."""
        if not self._options.secret:
            raise TransportUnavailable("transport tcp needs the application's secret; set secret in the configuration")

    def listen(self, region: Region, peer: Peer) -> TcpListener:
        listener = TcpListener(region, Doorway(self.name, self._options.host, self._options.secret, peer))
        listener.open(self._segments.get(peer))
        self._segments.keep(peer, listener.segment)
        return listener

    def connect(self, region: Region, peer: Peer, segment: str) -> TcpChannel:
        sock, key = connect_and_prove(Segment.from_text(segment, self.name), self._options.secret)
        channel = TcpChannel(region, map_region(region), sock, key)
        channel.open()
        return channel


def _fill(sock: socket.socket, target: memoryview) -> bool:
    """Receive exactly this many bytes; False where the stream ends first."""
    received = 0
    while received < len(target):
        count = sock.recv_into(target[received:])
        if not count:
            return False
        received += count
    return True


def _discard(sock: socket.socket, num_bytes: int) -> bool:
    scratch = memoryview(bytearray(min(num_bytes, _BIN_BYTES)))
    while num_bytes:
        count = sock.recv_into(scratch[: min(num_bytes, _BIN_BYTES)])
        if not count:
            return False
        num_bytes -= count
    return True
