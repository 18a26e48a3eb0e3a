"""Mooncake's ports give nothing to a process without the secret, on the same machine and with every number known."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore.errors import TransferError
from kvstore.transfer import guard
from kvstore.transfer.base import Channel, Peer, Region, Write, WriteState
from kvstore.transfer.handshake import Segment, connect_and_prove
from kvstore.transfer.mooncake import MooncakeListener, MooncakeTransport
from kvstore.transfer.options import TransportOptions
from kvstore.transfer.talk import Talk
from services.config import TransferConfig, set_mooncake_environment

SIZE = 1 << 20
SECRET = "known to few"


@dataclass
class Reader:
    """A listener over memory full of 0x11, and the numbers that a stranger might learn."""

    memory: mmap.mmap
    region: Region
    transport: MooncakeTransport
    listener: MooncakeListener
    channels: list[Channel] = field(default_factory=list)

    @property
    def target(self) -> str:
        return self.listener._engine.target

    @property
    def ports(self) -> list[int]:
        return sorted(self.listener._engine.ports)

    def attack(self) -> dict[str, Any]:
        return attack(self.target, self.ports, self.region.address)


def attack(target: str, ports: list[int], address: int) -> dict[str, Any]:
    """What a process without the secret gets from these ports."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.stranger", target, ",".join(map(str, ports)), str(address)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MC_HANDSHAKE_CONNECT_TIMEOUT": "1"},
        timeout=60,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def reader() -> Iterator[Reader]:
    set_mooncake_environment(TransferConfig())
    memory = mmap.mmap(-1, SIZE)
    memory[:] = b"\x11" * SIZE
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE)
    transport = MooncakeTransport(TransportOptions(secret=SECRET))
    listener = transport.listen(region, Peer("P", "p"))
    reader = Reader(memory, region, transport, listener)
    yield reader
    for channel in reader.channels:
        channel.close()
    listener.close()


def got_nothing(result: dict[str, Any]) -> bool:
    return result["engine"] == {"write": -1, "read": -1} and set(result["sockets"]) == {"TimeoutError"}


@pytest.mark.slow
def test_a_stranger_gets_nothing_before_a_writer_came(reader: Reader) -> None:
    assert got_nothing(reader.attack())
    assert reader.memory[:] == b"\x11" * SIZE


def test_a_stranger_gets_nothing_while_a_writer_is_connected(reader: Reader) -> None:
    source = mmap.mmap(-1, SIZE)
    source[:] = b"\x22" * SIZE
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(source)), SIZE)
    reader.listener.allow("t")
    channel = reader.transport.connect(region, Peer("D", "d"), reader.listener.segment)
    reader.channels.append(channel)
    assert got_nothing(reader.attack())
    assert reader.memory[:] == b"\x11" * SIZE
    (number,) = channel.submit([Write(0, 0, 4096, "t")])
    state = WriteState.PENDING
    deadline_s = time.monotonic() + 10
    while state is WriteState.PENDING:
        assert time.monotonic() < deadline_s
        state = channel.poll([number])[number]
    assert state is WriteState.DONE
    assert reader.memory[:4096] == b"\x22" * 4096


@pytest.mark.slow
def test_the_writers_own_engine_gives_a_stranger_nothing(reader: Reader) -> None:
    source = mmap.mmap(-1, SIZE)
    source[:] = b"\x33" * SIZE
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(source)), SIZE)
    channel = reader.transport.connect(region, Peer("D", "d"), reader.listener.segment)
    reader.channels.append(channel)
    engine = channel._engine
    assert got_nothing(attack(engine.target, sorted(engine.ports), region.address))
    assert source[:] == b"\x33" * SIZE


def test_without_a_guard_the_same_stranger_reads_and_writes(reader: Reader) -> None:
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(reader.region.address, SIZE) == 0
    result = attack(f"127.0.0.1:{engine.get_rpc_port()}", [], reader.region.address)
    assert result["engine"] == {"write": 0, "read": 0}
    assert reader.memory[:4096] == b"\x66" * 4096


def knock(reader: Reader) -> tuple[Talk, dict[str, Any]]:
    """Do what a writer does, up to the moment in which the door is ajar."""
    segment = Segment.from_text(reader.listener.segment, "mooncake")
    sock, key = connect_and_prove(segment, SECRET)
    talk = Talk(sock, key, is_writer=True)
    talk.send({"knock": "tcp"})
    return talk, talk.receive(5)


def request(sock: socket.socket, opcode: int, address: int, body: bytes = b"") -> bytes:
    sock.settimeout(5)
    sock.sendall(struct.pack("<QQB7x", 4096, address, opcode) + body)
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_who_slips_in_while_the_door_is_ajar_finds_no_memory_and_is_thrown_out(reader: Reader) -> None:
    talk, answer = knock(reader)
    data_port = next(p for p in answer["ports"] if not reader.target.endswith(f":{p}"))
    with socket.create_connection(("127.0.0.1", data_port), timeout=5) as thief:
        with socket.create_connection(("127.0.0.1", data_port), timeout=5) as other:
            assert request(other, 0, reader.region.address) == b""  # a read: refused and hung up
        talk.send({"mine": []})
        with pytest.raises(TransferError):
            talk.receive(10)
        assert request(thief, 1, reader.region.address, b"\x66" * 4096) == b""
    talk.close()
    assert reader.memory[:] == b"\x11" * SIZE
    assert got_nothing(reader.attack())  # of the engine that was put in its place


@pytest.mark.slow
def test_the_door_shuts_again_when_a_writer_vanishes_in_it(reader: Reader) -> None:
    talk, answer = knock(reader)
    talk.close()
    port = answer["ports"][0]
    deadline_s = time.monotonic() + 10
    while can_connect(port):
        assert time.monotonic() < deadline_s, "the port stays open"
    assert got_nothing(reader.attack())


def can_connect(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.05)
        try:
            sock.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


def test_no_listening_socket_of_an_engine_escapes_the_guard(reader: Reader) -> None:
    channel = reader.transport.connect(reader.region, Peer("D", "d"), reader.listener.segment)
    reader.channels.append(channel)
    guarded = set(reader.ports) | set(channel._engine.ports)
    for fd in guard.own_sockets().values():
        with socket.socket(fileno=os.dup(fd)) as sock:
            is_inet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if not is_inet or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if ipaddress_of(sock) in ("0.0.0.0", "::"):
                assert sock.getsockname()[1] in guarded


def ipaddress_of(sock: socket.socket) -> str:
    return str(sock.getsockname()[0])


def test_a_writer_without_the_secret_is_not_let_in(reader: Reader) -> None:
    stranger = MooncakeTransport(TransportOptions(secret="a guess"))
    with pytest.raises(TransferError):
        stranger.connect(reader.region, Peer("D", "d"), reader.listener.segment)
    assert reader.memory[:] == b"\x11" * SIZE


def test_closing_an_engine_leaves_no_thread_and_no_socket_behind() -> None:
    set_mooncake_environment(TransferConfig())
    memory = mmap.mmap(-1, SIZE)
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE)
    transport = MooncakeTransport(TransportOptions(secret=SECRET))
    transport.listen(region, Peer("P", "warm")).close()  # what the library keeps for good is there after this
    sockets, threads = set(guard.own_sockets()), threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    listener = transport.listen(region, Peer("P", "p"))
    channel = transport.connect(region, Peer("D", "d"), listener.segment)
    channel.close()
    listener.close()
    assert set(guard.own_sockets()) == sockets
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/task")) <= tasks
