from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.process import Child, ChildChannel
from kvstore.wire import MAX_FRAME_BYTES, Codec, Deframer, WireError

REPOSITORY = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Point:
    x: int
    label: str = ""


@dataclass(frozen=True)
class Path2:
    points: tuple[Point, ...]
    data: bytes
    extra: dict[str, object]
    parent: Path2 | None = None


CODEC = Codec((Point, Path2))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
points = st.builds(Point, x=st.integers(-(2**63), 2**64 - 1), label=st.text(max_size=5))
paths = st.recursive(
    st.builds(
        Path2,
        points=st.lists(points, max_size=3).map(tuple),
        data=st.binary(max_size=20),
        extra=st.dictionaries(st.text(max_size=3), plain, max_size=3),
    ),
    lambda inner: st.builds(Path2, points=st.just(()), data=st.just(b""), extra=st.just({}), parent=inner),
    max_leaves=3,
)


@given(points | paths)
def test_a_message_comes_back_equal(message: Any) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


@given(st.lists(paths, max_size=4), st.lists(st.integers(1, 7), min_size=1))
def test_frames_survive_any_cutting(messages: list[Path2], cuts: list[int]) -> None:
    stream = b"".join(CODEC.frame(message) for message in messages)
    deframer, received, at, step = Deframer(), [], 0, 0
    while at < len(stream):
        size = cuts[step % len(cuts)]
        received += [CODEC.decode(body) for body in deframer.feed(stream[at : at + size])]
        at, step = at + size, step + 1
    assert received == messages
    assert [CODEC.decode(body) for body in Deframer().feed(stream)] == messages


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):  # no other error gets out
        CODEC.decode(data)


@given(paths, st.data())
def test_a_cut_message_is_a_wire_error(message: Path2, data: st.DataObject) -> None:
    encoded = CODEC.encode(message)
    with pytest.raises(WireError):
        CODEC.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(WireError):
        CODEC.decode(encoded + b"\x00")


@dataclass(frozen=True)
class Stranger:
    x: int


def test_types_outside_the_codec_neither_leave_nor_enter() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        CODEC.encode(Stranger(1))
    with pytest.raises(TypeError, match="Stranger"):
        CODEC.encode(Path2((), b"", {"inside": Stranger(1)}))
    with pytest.raises(WireError, match="'Stranger' with 1 fields"):
        CODEC.decode(Codec((Stranger,)).encode(Stranger(1)))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (1, ["Point", 1]),  # too few fields
        (1, ["Point", 1, "a", 2]),
        (1, []),
        (1, 7),
        (1, [["Point"], 1, "a"]),
        (2, ["Point", 1, "a"]),
    ],
)
def test_a_malformed_typed_value_is_a_wire_error(code: int, body: object) -> None:
    with pytest.raises(WireError):
        CODEC.decode(msgpack.packb(msgpack.ExtType(code, msgpack.packb(body))))


def test_a_frame_over_the_cap_is_refused_by_both_ends() -> None:
    with pytest.raises(WireError, match="over the limit"):
        CODEC.frame(Path2((), b"\x00" * MAX_FRAME_BYTES, {}))
    with pytest.raises(WireError, match="over the limit"):
        list(Deframer().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
    assert list(Deframer().feed(MAX_FRAME_BYTES.to_bytes(4, "little"))) == []


# the pipe to a child process

ECHO = """
import sys
from dataclasses import dataclass
from kvstore.process import ChildChannel, die_with_parent
from kvstore.wire import Codec

@dataclass(frozen=True)
class Point:
    x: int
    label: str = ""

die_with_parent(int(sys.argv[2]))
channel = ChildChannel(int(sys.argv[1]), Codec((Point,)))
channel.send(Point(0, " ".join(sys.argv[3:])))
try:
    while True:
        for message in channel.receive(None):
            if message.label == "exit":
                sys.exit(message.x)
            if message.label == "garbage":
                import socket
                socket.socket(fileno=channel.fileno()).send(b"\\xff" * 64)
                channel.receive(30)
            channel.send(message)
except EOFError:
    sys.exit(5)
"""


class Parent:
    """A child and all that came from it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.codes: list[int] = []
        self.child = Child(Codec((Point,)), self.messages.append, self.codes.append, "echo")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[Parent]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    parent = Parent()
    await parent.child.start("echo_child", ["some", "args"], env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"})
    yield parent
    await parent.child.stop(0)
    await parent.until(lambda: not parent.child.running)


async def test_messages_go_both_ways_in_order(parent: Parent) -> None:
    sent = [Point(number, "x" * number) for number in range(1, 200)]
    for point in sent:
        parent.child.send(point)
    await parent.until(lambda: len(parent.messages) == 200)
    assert parent.messages == [Point(0, "some args"), *sent]
    assert parent.child.running
    assert parent.child.pid > 0


async def test_an_exit_is_told_once_with_its_code(parent: Parent) -> None:
    parent.child.send(Point(7, "exit"))
    await parent.until(lambda: parent.codes)
    assert parent.codes == [7]
    assert not parent.child.running
    parent.child.send(Point(1))  # goes nowhere, breaks nothing
    parent.child.kill()
    await parent.child.stop(1)
    assert parent.codes == [7]


async def test_a_killed_child_is_told_by_its_signal(parent: Parent) -> None:
    parent.child.kill()
    await parent.until(lambda: parent.codes)
    assert parent.codes == [-signal.SIGKILL]


async def test_stop_closes_the_pipe_and_lets_the_child_end_itself(parent: Parent) -> None:
    await parent.until(lambda: parent.messages)
    await parent.child.stop(20)
    assert parent.codes == [5]


async def test_stop_kills_a_child_that_does_not_listen(parent: Parent) -> None:
    await parent.until(lambda: parent.messages)
    os.kill(parent.child.pid, signal.SIGSTOP)
    await parent.child.stop(0.05)
    await parent.until(lambda: parent.codes)
    assert parent.codes == [-signal.SIGKILL]


async def test_a_child_that_sends_garbage_is_killed(parent: Parent) -> None:
    parent.child.send(Point(1, "garbage"))
    await parent.until(lambda: parent.codes)
    assert parent.codes == [-signal.SIGKILL]
    assert parent.messages == [Point(0, "some args")]


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """The child holds the write end of a pipe; its end is the end of the pipe."""
    (tmp_path / "idle_child.py").write_text(
        "import sys, time\nfrom kvstore.process import die_with_parent\n"
        "die_with_parent(int(sys.argv[2]))\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    code = (
        "import asyncio, sys\nfrom kvstore.process import Child\nfrom kvstore.wire import Codec\n"
        "async def main():\n"
        "    child = Child(Codec(()), print, print, 'idle')\n"
        "    await child.start('idle_child')\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=write_end, env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    ) as between:
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            assert await asyncio.to_thread(pipe.readline) == b"up\n"
            between.kill()
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(pipe.read) == b""


def test_receive_waits_no_longer_than_it_may_and_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    channel = ChildChannel(theirs.detach(), CODEC)
    with ours, socket.socket(fileno=channel.fileno()):
        assert channel.receive(0) == []
        assert channel.receive(0.01) == []
        frame = CODEC.frame(Point(1)) + CODEC.frame(Point(2))
        ours.sendall(frame[:-3])
        assert channel.receive(5) == [Point(1)]
        assert channel.receive(0) == []
        ours.sendall(frame[-3:])
        assert channel.receive(None) == [Point(2)]
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            channel.receive(None)
        channel._socket.detach()
