"""What every transport promises, checked on each of them over real memory and, where it has one, a real network."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.errors import TransferError
from kvstore.transfer import gate
from kvstore.transfer.base import Channel, Listener, Peer, Region, Transport, Write, WriteState
from kvstore.transfer.options import TransportOptions, load_transport
from services.config import TransferConfig, set_mooncake_environment
from tests.faults.control import Faults

SIZE = 4 << 20
WAIT_S = 20.0
WRITER, READER = Peer("P", "p1"), Peer("D", "d1")


class Memory:
    def __init__(self, fill: int) -> None:
        self.bytes = mmap.mmap(-1, SIZE)
        self.bytes[:] = bytes([fill]) * SIZE
        self.region = Region(ctypes.addressof(ctypes.c_char.from_buffer(self.bytes)), SIZE)


class World:
    """Two memories, and what connects them; closes whatever a test left open."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.source, self.target = Memory(1), Memory(0)
        self._closers: list[Callable[[], None]] = []

    def listen(self, peer: Peer = WRITER) -> Listener:
        listener = self.transport.listen(self.target.region, peer)
        self._closers.append(listener.close)
        return listener

    def connect(self, listener: Listener) -> Channel:
        channel = self.transport.connect(self.source.region, READER, listener.segment)
        self._closers.append(channel.close)
        return channel

    def pair(self, ticket_id: str = "t", peer: Peer = WRITER) -> tuple[Listener, Channel]:
        listener = self.listen(peer)
        listener.allow(ticket_id)
        return listener, self.connect(listener)

    def close(self) -> None:
        for closer in reversed(self._closers):
            try:
                closer()
            except (TransferError, OSError):
                continue  # closed by the test


FAULTY = "tests.faults.transport:Faulty"
TRANSPORTS = ["local", "tcp", "mooncake", f"{FAULTY}Local", f"{FAULTY}Tcp"]


@pytest.fixture(params=[*TRANSPORTS, pytest.param(f"{FAULTY}Mooncake", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """The fault-injecting transport with no fault switched on is one more transport."""
    set_mooncake_environment(TransferConfig())
    device = str(Faults(tmp_path, num_layers=1).path) if request.param.startswith(FAULTY) else ""
    transport, note = load_transport(request.param, TransportOptions(secret="for tests", device=device))
    assert not note
    world = World(transport)
    yield world
    world.close()


def finish(channel: Channel, ids: Sequence[int]) -> dict[int, WriteState]:
    """The end of each write; fails where one has none in time."""
    ended: dict[int, WriteState] = {}
    deadline_s = time.monotonic() + WAIT_S
    while len(ended) < len(ids):
        assert time.monotonic() < deadline_s, f"{len(ids) - len(ended)} writes did not end"
        states = channel.poll([i for i in ids if i not in ended])
        ended.update((i, s) for i, s in states.items() if s is not WriteState.PENDING)
        time.sleep(0.001)
    return ended


def write_fails(channel: Channel, write: Write) -> bool:
    try:
        (number,) = channel.submit([write])
    except TransferError:
        return True
    return finish(channel, [number])[number].failure is not None


def test_two_hundred_writes_of_any_size_land_byte_for_byte(world: World) -> None:
    _, channel = world.pair()
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    world.source.bytes[:] = rng.randbytes(SIZE)
    expected = bytearray(SIZE)
    for _ in range(20):
        slots = rng.sample(range(64), 10)
        writes = []
        for slot in slots:  # within a slot of its own, so that no two writes of a round meet
            num_bytes = rng.choice((1, rng.randrange(1, 500), rng.randrange(1, SIZE // 64)))
            target = slot * (SIZE // 64) + rng.randrange(SIZE // 64 - num_bytes + 1)
            source = rng.randrange(SIZE - num_bytes + 1)
            writes.append(Write(source, target, num_bytes, "t"))
            expected[target : target + num_bytes] = world.source.bytes[source : source + num_bytes]
        states = finish(channel, channel.submit(writes))
        assert set(states.values()) == {WriteState.DONE}, f"seed {seed}"
        assert bytes(world.target.bytes) == expected, f"seed {seed}"


def test_one_write_covers_the_whole_memory(world: World) -> None:
    _, channel = world.pair()
    world.source.bytes[:] = os.urandom(SIZE)
    (number,) = channel.submit([Write(0, 0, SIZE, "t")])
    assert finish(channel, [number]) == {number: WriteState.DONE}
    assert world.target.bytes[:] == world.source.bytes[:]


def test_a_write_past_the_readers_memory_is_refused(world: World) -> None:
    _, channel = world.pair()
    for offset, num_bytes in ((SIZE, 1), (SIZE - 10, 11), (1 << 40, 8)):
        assert write_fails(channel, Write(0, offset, num_bytes, "t")), (offset, num_bytes)
    assert not any(world.target.bytes[:])


def test_a_write_from_outside_our_memory_starts_nothing(world: World) -> None:
    _, channel = world.pair()
    for offset, num_bytes in ((-1, 4), (SIZE - 10, 11), (0, 0)):
        with pytest.raises(TransferError, match="source memory"):
            channel.submit([Write(offset, 0, num_bytes, "t")])


def test_a_ticket_that_was_never_allowed_lands_nothing(world: World) -> None:
    _, channel = world.pair()
    assert write_fails(channel, Write(0, 0, 4096, "another"))
    assert not any(world.target.bytes[:])


def test_a_write_may_overtake_the_message_that_allows_its_ticket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "GRACE_S", WAIT_S)
    listener = world.listen()
    channel = world.connect(listener)
    ids: list[int] = []
    sender = threading.Thread(target=lambda: ids.extend(channel.submit([Write(0, 0, 4096, "t")])))
    sender.start()
    listener.allow("t")
    sender.join(WAIT_S)
    assert finish(channel, ids) == {ids[0]: WriteState.DONE}


def test_a_revoked_ticket_lands_nothing_once_it_is_fenced(world: World) -> None:
    listener, channel = world.pair()
    finish(channel, channel.submit([Write(0, 0, 4096, "t")]))
    if not listener.revoke("t"):
        listener.close()
    landed = bytes(world.target.bytes)
    assert write_fails(channel, Write(0, 8192, 4096, "t"))
    assert bytes(world.target.bytes) == landed


def test_revoking_a_ticket_that_nobody_sends_is_a_fence_at_once(world: World) -> None:
    listener, channel = world.pair()
    listener.allow("idle")
    finish(channel, channel.submit([Write(0, 0, 4096, "t")]))
    assert listener.revoke("idle")
    assert write_fails(channel, Write(0, 8192, 4096, "idle"))


def test_nothing_lands_after_the_channel_is_closed(world: World) -> None:
    _, channel = world.pair()
    channel.submit([Write(0, 0, SIZE, "t") for _ in range(24)])
    channel.close()
    landed = bytes(world.target.bytes)
    world.source.bytes[:] = b"\x07" * SIZE  # the memory has a new owner
    again = world.connect(world.listen(Peer("P2", "p2")))  # time for whatever is left to arrive, without a sleep
    again.close()
    assert bytes(world.target.bytes) == landed
    assert 7 not in landed


def test_a_closed_channel_starts_nothing(world: World) -> None:
    _, channel = world.pair()
    channel.close()
    with pytest.raises(TransferError):
        channel.submit([Write(0, 0, 1, "t")])


def test_fencing_one_peer_disturbs_no_other(world: World) -> None:
    first_listener, first = world.pair(peer=Peer("P1", "a"))
    _, second = world.pair(peer=Peer("P2", "b"))
    ids = second.submit([Write(0, 0, SIZE, "t") for _ in range(12)])
    first.submit([Write(0, 0, SIZE, "t") for _ in range(4)])
    first.close()
    first_listener.close()
    assert set(finish(second, ids).values()) == {WriteState.DONE}


def test_a_closed_listener_fails_the_writer(world: World) -> None:
    listener, channel = world.pair()
    finish(channel, channel.submit([Write(0, 0, 4096, "t")]))
    listener.close()
    landed = bytes(world.target.bytes)
    assert write_fails(channel, Write(0, 8192, 4096, "t"))
    assert bytes(world.target.bytes) == landed


def test_nobody_connects_to_a_closed_listener(world: World) -> None:
    listener = world.listen()
    segment = listener.segment
    listener.close()
    with pytest.raises(TransferError):
        world.transport.connect(world.source.region, READER, segment)


def test_a_listener_comes_back_under_its_name(world: World) -> None:
    if world.transport.name.endswith("local"):
        pytest.skip("a local listener has no address that could be kept")
    listener = world.listen()
    segment = listener.segment
    listener.close()
    listener, channel = world.pair()
    assert listener.segment == segment
    (number,) = channel.submit([Write(0, 0, 4096, "t")])
    assert finish(channel, [number]) == {number: WriteState.DONE}
