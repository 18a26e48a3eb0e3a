"""Stores of every shape on loopback: servers of one's own configuration, sentinels, clusters, TLS and slow wires."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvstore.index.embedded import server_binary
from services.bench.stage import free_port

START_S = 20.0


class Server:
    """One process; ``lines`` are added to its configuration. `stop` kills it."""

    def __init__(self, folder: Path, *lines: str, port: int = 0, is_sentinel: bool = False) -> None:
        self.port = port or _port()
        self._folder = folder / f"{'sentinel' if is_sentinel else 'server'}-{self.port}"
        self._lines = ("bind 127.0.0.1", f"port {self.port}", 'save ""', "logfile server.log", *lines)
        self._is_sentinel = is_sentinel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, *, username: str | None = None, password: str | None = None) -> None:
        """Returns once it answers this user."""
        self._folder.mkdir(exist_ok=True)
        config = self._folder / "server.conf"
        if not config.exists():
            config.write_text("\n".join((*self._lines, f"dir {self._folder}")) + "\n", encoding="utf-8")
        command = [server_binary(), str(config), *(["--sentinel"] if self._is_sentinel else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        async with asyncio.timeout(START_S), self.client(username=username, password=password) as client:
            while True:
                assert self._process.poll() is None, (self._folder / "server.log").read_text(encoding="utf-8")
                with contextlib.suppress(RedisError, OSError):
                    await client.ping()
                    return
                await asyncio.sleep(0.02)

    def client(self, *, username: str | None = None, password: str | None = None) -> Redis:
        return Redis(port=self.port, username=username, password=password, protocol=2)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _port() -> int:
    """A free one; a cluster's nodes talk on the one that is 10,000 higher."""
    return next(port for port in iter(free_port, 0) if port <= 55535)


@contextlib.contextmanager
def stopping(*servers: Server) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.stop()


async def make_cluster(folder: Path, count: int, *lines: str, password: str | None = None) -> list[Server]:
    """``count`` primaries that share the slots, ready for use."""
    quick = ("cluster-enabled yes", "cluster-node-timeout 2000", "cluster-config-file nodes.conf")
    servers = [Server(folder, *quick, *lines) for _ in range(count)]
    try:
        for i, server in enumerate(servers):
            await server.start(password=password)
            async with server.client(password=password) as client:
                first, last = 16384 * i // count, 16384 * (i + 1) // count - 1
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                for other in servers[:i]:
                    await client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        async with asyncio.timeout(START_S):
            for server in servers:
                async with server.client(password=password) as client:
                    while not await _knows_all(client, count):
                        await asyncio.sleep(0.05)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


async def _knows_all(client: Redis, count: int) -> bool:
    info = await client.execute_command("CLUSTER", "INFO")
    return all(
        line in info.decode().split("\r\n")
        for line in ("cluster_state:ok", "cluster_slots_ok:16384", f"cluster_size:{count}")
    )


class Wire:
    """A TCP relay in front of a server: with TLS on the client's side, slow, or cut."""

    def __init__(self, target_port: int, tls: ssl.SSLContext | None = None) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        """Of everything that the server says, from now on."""
        self.port = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes every connection; `start` opens the same port again."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
            pumps = [
                asyncio.create_task(self._pump(reader, back, False)),
                asyncio.create_task(self._pump(there, writer, True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                back.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_slow: bool) -> None:
        while data := await source.read(1 << 16):
            if is_slow and self.delay_s:
                await asyncio.sleep(self.delay_s)
            target.write(data)
            await target.drain()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1: certificate and key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key
