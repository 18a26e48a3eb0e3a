"""A listening socket that lets in nobody but the holders of the application's secret, and knows every connection it
let in.

    open ─► accepting ─► each connection: proven within 3 s, then served in a thread of its own ─► close: no thread is
    left

At most sixteen connections wait for their proof and four are served; one more is closed at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvstore.errors import TransferError
from kvstore.transfer import guard
from kvstore.transfer.base import Peer
from kvstore.transfer.handshake import Segment, prove_to_writer, tune

MAX_WAITING = 16
MAX_CONNECTIONS = 4
MAX_SEGMENTS = 1024

log = logging.getLogger("pdray.transfer")

Serve = Callable[[socket.socket, bytes], None]


class Segments:
    """The last segment of each peer, so that a listener opened again after a fence comes back under its name."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Peer, str] = OrderedDict()

    def get(self, peer: Peer) -> str:
        return self._texts.get(peer, "")

    def keep(self, peer: Peer, text: str) -> None:
        self._texts[peer] = text
        if len(self._texts) > MAX_SEGMENTS:
            self._texts.popitem(last=False)


class Doorway:
    """One peer's door. Built closed; `open` binds."""

    def __init__(self, transport: str, host: str, secret: str, peer: Peer) -> None:
        self._transport = transport
        self._host = host
        self._secret = secret
        self._peer = peer
        self._socket: socket.socket | None = None
        self._serve: Serve | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._waiting = 0
        self._is_closed = False
        self._acceptor: threading.Thread | None = None
        self.segment = ""

    def open(self, serve: Serve, again: str = "") -> None:
        """Listen, at the port and under the name of an earlier segment where one is given and its port is free.

        ``serve`` is called in a thread for each proven connection, with the connection's key; it is closed when that
        returns. Raises TransferError where the address cannot be bound.
        """
        self._serve = serve
        earlier = Segment.from_text(again, self._transport) if again else None
        self._socket = self._bind(earlier.port if earlier else 0)
        port = self._socket.getsockname()[1]
        same = earlier is not None and earlier.port == port
        self.segment = Segment(
            transport=self._transport,
            host=self._host,
            port=port,
            listener_id=earlier.listener_id if same and earlier else os.urandom(16).hex(),
            worker_id=self._peer.worker_id,
            epoch=self._peer.epoch,
        ).to_text()
        self._acceptor = threading.Thread(target=self._accept, name=f"door-{port}", daemon=True)
        self._acceptor.start()

    def _bind(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        for candidate in dict.fromkeys((port, 0)):
            try:
                with guard.opening:
                    return socket.create_server((self._host, candidate), family=family, backlog=16)
            except OSError as exc:
                if candidate == 0:
                    raise TransferError(f"cannot listen on {self._host}: {exc}") from None
        raise AssertionError("port 0 was tried")

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # closed
            with self._lock:
                crowded = self._waiting >= MAX_WAITING or len(self._connections) >= MAX_WAITING + MAX_CONNECTIONS
                if self._is_closed or crowded:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._run, args=(sock,), name="door-connection", daemon=True)
                self._connections[sock] = thread
                self._waiting += 1
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        is_waiting = True
        try:
            tune(sock)
            key = prove_to_writer(sock, self._secret, self.segment)
            with self._lock:
                self._waiting -= 1
                is_waiting = False
            sock.settimeout(None)
            assert self._serve is not None
            self._serve(sock, key)
        except (OSError, TransferError) as exc:
            if not self._is_closed:
                level = logging.WARNING if is_waiting else logging.INFO
                log.log(level, "a connection for %s ended: %s", self._peer.worker_id, exc)
        finally:
            with self._lock:
                self._waiting -= is_waiting
                self._connections.pop(sock, None)
            sock.close()

    def end_connections(self) -> None:
        """Let every connection's thread read the end of its stream; each closes its socket once it is done with what
        it has."""
        with self._lock:
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RD)

    def close(self, timeout_s: float) -> None:
        """When this returns no connection is served and none can be made. Raises TransferError after ``timeout_s``."""
        with self._lock:
            self._is_closed = True
            threads = list(self._connections.values())
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self.end_connections()
        deadline_s = time.monotonic() + timeout_s
        for thread in (*threads, *([self._acceptor] if self._acceptor else [])):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise TransferError(f"a connection of {self._peer.worker_id} did not end within {timeout_s} s")
