"""The transfer process of a worker: ``python -m kvstore.transfer.process PIPE_FD PARENT_PID MEMFD PROGRESS_FD``.

    Start ─► map the memory, build the transport ─► Started ─► pipe, progress and events of threads, until the pipe
    closes
                                               └──► StartFailed, exit

It is a process of its own because closing a Mooncake engine holds the interpreter for up to a second, and because its
end fences every peer at once. The main thread never blocks on a peer: channels, listeners and hashes have threads. A
peer that cannot be fenced from inside ends the process with EXIT_STUCK; its parent starts another one. PROGRESS_FD is
-1 on a worker that only reads. The process never imports torch, and leaves nothing behind however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

from kvstore.errors import KVError, TransportUnavailable
from kvstore.geometry import KVGeometry
from kvstore.process import ChildChannel, die_with_parent
from kvstore.transfer import messages as m
from kvstore.transfer.base import ChannelStuck, Peer, Region
from kvstore.transfer.chatter import divert_stderr
from kvstore.transfer.options import TransportOptions, load_spares, load_transport
from kvstore.transfer.progress import MAX_MESSAGE_BYTES, decode
from kvstore.transfer.reader import ListenerFenced, ListenerStuck, Reader, ReaderEvent, Reply
from kvstore.transfer.several import Several
from kvstore.transfer.writer import Writer, WriterEvent

EXIT_STUCK = 70
EXIT_START_FAILED = 1
_PROGRESS_BATCH = 256

log = logging.getLogger("pdray.transfer")


@dataclass(slots=True)
class _PendingFence:
    """A Fence is answered once its writing and its reading half are over."""

    message: m.Fence
    is_writer_done: bool = False
    is_reader_done: bool = False
    segment: str = ""
    later: list[m.Fence] = field(default_factory=list)


class Mailbox:
    """Events from threads to the main loop; ``fileno`` is readable while there are any."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[WriterEvent | ReaderEvent] = queue.SimpleQueue()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def put(self, event: WriterEvent | ReaderEvent) -> None:
        self._events.put(event)
        with contextlib.suppress(BlockingIOError):  # it is readable already
            self._theirs.send(b"x")

    def take(self) -> list[WriterEvent | ReaderEvent]:
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1 << 16)
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events


class TransferProcess:
    """The main loop. Raises EOFError when the parent closed the pipe, ChannelStuck where a peer cannot be fenced."""

    def __init__(self, channel: ChildChannel, progress_fd: int, start: m.Start, memory: mmap.mmap) -> None:
        options = TransportOptions(
            host=start.host,
            secret=start.secret,
            protocol=start.protocol,
            device=start.device,
            max_outstanding=start.max_outstanding,
        )
        self._channel = channel
        self._mailbox = Mailbox()
        name, lax = start.transport, start.allow_fallback
        chosen, self.note = load_transport(name, options, allow_fallback=lax)
        self._transport = Several([chosen, *load_spares(name, chosen.name, options, allow_fallback=lax)])
        view = memoryview(memory)
        region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(view))
        self._writer = Writer(self._transport, region, view, start, channel.send, self._mailbox.put)
        self._reader = Reader(self._transport, region, view, start, self._mailbox.put)
        self._fences: dict[Peer, _PendingFence] = {}
        self._progress = None if progress_fd < 0 else socket.socket(fileno=progress_fd)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._mailbox.fileno(), select.POLLIN)
        if self._progress is not None:
            self._progress.setblocking(False)
            self._poll.register(self._progress.fileno(), select.POLLIN)

    @property
    def transport_names(self) -> tuple[str, ...]:
        return self._transport.names

    def run(self) -> None:
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._wait_ms())}
            now_s = time.monotonic()
            if self._channel.fileno() in ready:
                for message in self._channel.receive(0):
                    self.on_message(message, now_s)
            if self._progress is not None and self._progress.fileno() in ready:
                self._read_progress(self._progress, now_s)
            if self._mailbox.fileno() in ready:
                for event in self._mailbox.take():
                    self._on_event(event, now_s)
            for peer in self._writer.act(time.monotonic()):
                self._fence_half(peer, is_writer=True)

    def _wait_ms(self) -> float | None:
        wakeup_s = self._writer.session.next_wakeup_s()
        return None if wakeup_s is None else max(0.0, (wakeup_s - time.monotonic()) * 1000)

    def on_message(self, message: object, now_s: float) -> None:
        if isinstance(message, m.Fence):
            self._fence(message, now_s)
        elif not (self._writer.handle(message, now_s) or self._reader.handle(message)):
            log.warning("a %s has no meaning here", type(message).__name__)

    def _read_progress(self, progress: socket.socket, now_s: float) -> None:
        for _ in range(_PROGRESS_BATCH):
            try:
                data = progress.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._poll.unregister(progress.fileno())  # the engine ended; its parent knows
                progress.close()
                self._progress = None
                return
            self._writer.on_progress(decode(data), now_s)

    def _on_event(self, event: WriterEvent | ReaderEvent, now_s: float) -> None:
        match event:
            case Reply():
                self._channel.send(event.message)
            case ListenerFenced():
                self._fence_half(event.peer, is_writer=False, segment=event.segment)
            case ListenerStuck():
                raise ChannelStuck(f"the listener for {event.peer.worker_id}: {event.reason}")
            case _:
                self._writer.on_event(event, now_s)

    def _fence(self, message: m.Fence, now_s: float) -> None:
        peer = Peer(message.worker_id, message.epoch)
        if peer in self._fences:
            self._fences[peer].later.append(message)
            return
        self._fences[peer] = _PendingFence(message)
        self._writer.session.fence(message, now_s)
        self._reader.fence(message)

    def _fence_half(self, peer: Peer, *, is_writer: bool, segment: str = "") -> None:
        pending = self._fences.get(peer)
        if pending is None:
            return
        pending.is_writer_done |= is_writer
        pending.is_reader_done |= not is_writer
        pending.segment = segment or pending.segment
        if pending.is_writer_done and pending.is_reader_done:
            del self._fences[peer]
            self._channel.send(m.Fenced(worker_id=peer.worker_id, epoch=peer.epoch, segment=pending.segment))
            for message in pending.later:
                self._fence(message, time.monotonic())


def _end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """A peer whose thread is gone would be waited for in vain; the end of the process fences it, and is seen."""
    log.error("a thread failed; ending, so that nothing can land any more", exc_info=failed.exc_value)
    logging.shutdown()
    os._exit(EXIT_STUCK)


def main(argv: list[str]) -> int:
    pipe_fd, parent_pid, memory_fd, progress_fd = (int(a) for a in argv)
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service process drains first
    logging.basicConfig(
        stream=divert_stderr(), level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    threading.excepthook = _end_with_thread
    channel = ChildChannel(pipe_fd, m.CODEC)
    try:
        first = channel.receive(m.START_S)
        if not first or not isinstance(first[0], m.Start):
            channel.send(m.StartFailed(message="the first message must be Start"))
            return EXIT_START_FAILED
        num_bytes = KVGeometry.from_dict(first[0].geometry).total_bytes
        process = TransferProcess(channel, progress_fd, first[0], mmap.mmap(memory_fd, num_bytes))
        name, *spares = process.transport_names
        channel.send(m.Started(pid=os.getpid(), transport=name, spares=tuple(spares), note=process.note))
        for message in first[1:]:
            process.on_message(message, time.monotonic())
        process.run()
    except EOFError:
        return 0
    except (TransportUnavailable, OSError, ValueError, TypeError, KeyError) as exc:
        channel.send(m.StartFailed(message=str(exc)))
        return EXIT_START_FAILED
    except KVError as exc:
        log.error("ending, so that nothing can land any more: %s", exc)
        return EXIT_STUCK
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # threads may be inside a transport; the end of the process is what stops them
