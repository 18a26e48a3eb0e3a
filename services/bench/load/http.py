"""A small HTTP/1.1 client on asyncio protocols: it hands on body bytes with the moment they came, and little else.

    idle ─ask─► busy ─whole answer, kept alive─► idle
                 └─ closed, refused, no HTTP ─► closed (HttpError)

One streamed token costs one callback. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from kvstore.errors import ConfigError

MAX_KEPT_BYTES = 1024 * 1024  # of an answer that is kept whole
CLIENT_LIMIT = "client_limit"
"""Kind of a failure that is the client machine's own: it has no more sockets or ports."""
OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})
OnBody = Callable[[bytes, float], None]
Clock = Callable[[], float]


class HttpError(Exception):
    """The exchange did not come to its end. ``kind`` is a word for counting."""

    def __init__(self, kind: str, message: str, *, is_untouched: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_untouched = is_untouched  # a kept connection died before a byte of the answer: another may be tried


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is."""

    host: str
    port: int
    prefix: str
    is_tls: bool

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Raises ConfigError for anything but http(s)://host[:port][/prefix]."""
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"--base-url {base_url}: {exc}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"--base-url {base_url}: give it as http://host:port")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls)

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """A whole request's bytes."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {name}:{self.port}"]
        given = {"Accept": "*/*", "Content-Type": "application/json", **headers, "Content-Length": str(len(body))}
        lines += [f"{key}: {value}" for key, value in given.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(slots=True)
class Reply:
    """Status and headers of an answer; the body, as far as nobody else took it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0  # of the body

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reply = Reply()
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[Reply] | None = None
        self._at_s = 0.0
        self._exchanges = 0
        self.is_open = False

    async def ask(self, request: bytes, on_body: OnBody | None) -> Reply:
        """Send a request and wait for the end of its answer; ``on_body`` gets the body of a 200 as it comes.

        Raises:
            HttpError: the connection broke, or what came is no HTTP.
        """
        assert self._transport is not None
        assert self._done is None
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._on_body = Reply(), on_body
        self._done = asyncio.get_running_loop().create_future()
        self._exchanges += 1
        try:
            self._transport.write(request)
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._at_s = self._clock()
        if self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__ or exc
            self._fail(HttpError("bad_answer", f"{type(cause).__name__}: {cause}"))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(HttpError("no_http", f"what came is no HTTP/1.1: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        ends_by_close = self._reply.status and not {"content-length", "transfer-encoding"} & self._reply.headers.keys()
        if ends_by_close and exc is None:
            self._finish()
            return
        got = f"{self._reply.num_bytes} bytes of the body"
        why = f" ({exc})" if exc else ""
        is_untouched = self._exchanges > 1 and not self._reply.status
        self._fail(HttpError("closed", f"the connection was closed after {got}{why}", is_untouched=is_untouched))

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.num_bytes += len(body)
        if self._on_body is not None and self._reply.status == 200:
            self._on_body(body, self._at_s)
        elif len(self._reply.body) < MAX_KEPT_BYTES:
            self._reply.body += body

    def on_message_complete(self) -> None:
        if self._reply.status >= 200:
            self.is_open = self.is_open and bool(self._parser.should_keep_alive())
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._reply)

    def _fail(self, error: HttpError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class Pool:
    """Connections to one server; those that are free are used again, the latest first."""

    def __init__(self, target: Target, clock: Clock, headers: dict[str, str] | None = None) -> None:
        self.target = target
        self.clock = clock
        self.headers = headers or {}
        self._tls = ssl.create_default_context() if target.is_tls else None
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, on_body: OnBody | None = None) -> Reply:
        """One exchange.

        Raises:
            HttpError: it did not come to its end. A kept connection that turns out dead is replaced once.
        """
        connection = self._take() or await self._connect()
        try:
            reply = await connection.ask(request, on_body)
        except HttpError as exc:
            if not exc.is_untouched:
                raise
            connection = await self._connect()
            reply = await connection.ask(request, on_body)
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def get(self, path: str) -> Reply:
        return await self.ask(self.target.request("GET", path, self.headers, b""))

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports go

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self.clock), self.target.host, self.target.port, ssl=self._tls
            )
        except (OSError, ssl.SSLError) as exc:
            kind = CLIENT_LIMIT if exc.errno in OWN_ERRNOS else "connect"
            raise HttpError(kind, f"{self.target.host}:{self.target.port}: {exc}") from None
        return connection


async def quietly(pool: Pool, path: str) -> Reply | None:
    """A GET whose failure only means that there is nothing."""
    with suppress(HttpError, TimeoutError):
        async with asyncio.timeout(10):
            return await pool.get(path)
    return None
