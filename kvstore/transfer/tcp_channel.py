"""The writing half of the tcp transport: frames out, acknowledgements in."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence

from kvstore.errors import SubmitFailed, TransferError
from kvstore.transfer import frames
from kvstore.transfer.base import ChannelStuck, Region, Write, WriteState, check_source

CONFIRM_S = 2.0
_WAIT_MS = 50
_NO_LINGER = struct.pack("ii", 1, 0)


class TcpChannel:
    """One proven connection to a reader. `submit` is for one thread; `poll` and `close` for any."""

    def __init__(self, region: Region, memory: memoryview, sock: socket.socket, key: bytes) -> None:
        self._region = region
        self._memory = memory
        self._socket = sock
        self._key = key
        self._sequence = 0
        self._states: dict[int, WriteState] = {}
        self._lock = threading.Lock()  # of the states
        self._inside = threading.Lock()  # held while a frame is being sent
        self._is_broken = False
        self._is_closing = False
        self._is_confirmed = False  # the reader closed its end, so nothing lands any more
        self._acks = threading.Thread(target=self._read_acks, name="tcp-acks", daemon=True)

    def open(self) -> None:
        self._socket.settimeout(None)
        self._acks.start()

    def submit(self, writes: Sequence[Write]) -> list[int]:
        check_source(self._region, writes)
        ids: list[int] = []
        with self._inside:
            if self._is_broken or self._is_closing:
                raise SubmitFailed("the connection to the reader is closed")
            for write in writes:
                self._sequence += 1
                ids.append(self._sequence)
                with self._lock:
                    self._states[self._sequence] = WriteState.FAILED if self._is_broken else WriteState.PENDING
                if not self._is_broken:
                    self._send(write)
        return ids

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        with self._lock:
            found = {i: self._states.get(i, WriteState.FAILED) for i in ids}
            for i, state in found.items():
                if state is not WriteState.PENDING:
                    self._states.pop(i, None)
        return found

    def close(self) -> None:
        self._is_closing = True  # a submit that waits for room gives up within _WAIT_MS
        if not self._inside.acquire(timeout=CONFIRM_S):
            raise ChannelStuck("a thread is still sending")
        self._inside.release()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._acks.join(CONFIRM_S)
        confirmed = self._is_confirmed
        if not confirmed:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                self._socket.shutdown(socket.SHUT_RDWR)
            self._acks.join(CONFIRM_S)
        self._socket.close()
        if not confirmed:
            raise TransferError(f"the reader did not confirm the end of the connection within {CONFIRM_S} s")

    def _send(self, write: Write) -> None:
        frame = frames.Frame(self._sequence, write.target_offset, write.num_bytes, frames.ticket_key(write.ticket_id))
        payload = self._memory[write.source_offset : write.source_offset + write.num_bytes]
        parts: list[bytes | memoryview] = [frames.pack(frame, self._key), payload]
        while parts and not self._is_closing:
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                poller.poll(_WAIT_MS)
                continue
            except OSError:
                self._break()
                return
            parts = _rest(parts, sent)

    def _read_acks(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError as exc:
                self._is_confirmed = isinstance(exc, ConnectionResetError)
                break
            if not data:
                self._is_confirmed = True
                break
            buffer += data
            whole = len(buffer) - len(buffer) % frames.ACK.size
            with self._lock:
                for sequence, state in frames.ACK.iter_unpack(bytes(buffer[:whole])):
                    if sequence in self._states:
                        self._states[sequence] = WriteState.DONE if state == frames.LANDED else WriteState.FAILED
            del buffer[:whole]
        self._break()

    def _break(self) -> None:
        with self._lock:
            self._is_broken = True
            for sequence, state in self._states.items():
                if state is WriteState.PENDING:
                    self._states[sequence] = WriteState.FAILED


def _rest(parts: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """What is left of the parts after ``sent`` bytes of them went out."""
    rest: list[bytes | memoryview] = []
    for part in parts:
        taken = min(sent, len(part))
        sent -= taken
        if taken < len(part):
            rest.append(memoryview(part)[taken:])
    return rest
