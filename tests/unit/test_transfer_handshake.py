"""Who may talk to a listener: the proof, the frames and the messages that follow it."""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import TransferError, TransportUnavailable
from kvstore.transfer import frames
from kvstore.transfer.base import Peer, Region
from kvstore.transfer.doorway import MAX_WAITING
from kvstore.transfer.handshake import (
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    Segment,
    connect_and_prove,
    prove_to_reader,
    prove_to_writer,
)
from kvstore.transfer.options import TransportOptions, load_transport
from kvstore.transfer.talk import Talk
from kvstore.transfer.tcp import TcpListener, TcpTransport

SIZE = 1 << 16
SEGMENT = Segment(transport="tcp", host="127.0.0.1", port=1, listener_id="ab", worker_id="P", epoch="p").to_text()


def both(reader: Callable[[socket.socket], bytes], writer: Callable[[socket.socket], bytes]) -> list[bytes | str]:
    """Run both ends; what each returned, or the text of its error."""
    ends = socket.socketpair()
    results: list[bytes | str] = ["", ""]

    def run(index: int, act: Callable[[socket.socket], bytes]) -> None:
        try:
            results[index] = act(ends[index])
        except TransferError as exc:
            results[index] = str(exc)
        finally:
            ends[index].close()

    threads = [threading.Thread(target=run, args=(i, act)) for i, act in enumerate((reader, writer))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_two_holders_of_the_secret_get_the_same_key() -> None:
    ours, theirs = both(
        lambda sock: prove_to_writer(sock, "secret", SEGMENT), lambda sock: prove_to_reader(sock, "secret", SEGMENT)
    )
    assert isinstance(ours, bytes)
    assert ours == theirs
    assert len(ours) == 32


def test_another_secret_is_turned_away() -> None:
    ours, theirs = both(
        lambda sock: prove_to_writer(sock, "secret", SEGMENT), lambda sock: prove_to_reader(sock, "guess", SEGMENT)
    )
    assert "does not have this application's secret" in str(ours)
    assert "closed the connection" in str(theirs)


def test_a_proof_for_another_listener_is_worth_nothing() -> None:
    other = SEGMENT.replace('"ab"', '"cd"')
    ours, _ = both(
        lambda sock: prove_to_writer(sock, "secret", SEGMENT), lambda sock: prove_to_reader(sock, "secret", other)
    )
    assert "means another listener" in str(ours)


def test_a_listener_without_the_secret_is_found_out() -> None:
    def pretend(sock: socket.socket) -> bytes:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
        proof = sock.recv(NONCE_BYTES + MAC_BYTES)
        sock.sendall(proof[NONCE_BYTES:])  # the writer's own proof, sent back
        return b""

    _, theirs = both(pretend, lambda sock: prove_to_reader(sock, "secret", SEGMENT))
    assert "does not have this application's secret" in str(theirs)


def test_the_secret_never_crosses_the_wire() -> None:
    seen = bytearray()

    def listen_in(sock: socket.socket) -> bytes:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
        seen.extend(sock.recv(1 << 12))
        return b""

    both(listen_in, lambda sock: prove_to_reader(sock, "a long and plain secret", SEGMENT))
    assert len(seen) == NONCE_BYTES + MAC_BYTES
    assert b"plain" not in seen


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "x" * 5000, SEGMENT.replace("127.0.0.1", ""), '{"port":"1"}', SEGMENT.replace(":1", ':"1"')],
)
def test_what_is_no_segment_is_refused(text: str) -> None:
    if text == SEGMENT.replace("127.0.0.1", ""):
        with pytest.raises(TransferError):
            connect_and_prove(Segment.from_text(text, "tcp"), "secret", attempts=1)
    else:
        with pytest.raises(TransferError):
            Segment.from_text(text, "tcp")


def test_a_segment_of_another_transport_is_refused_and_both_are_named() -> None:
    with pytest.raises(TransferError, match=r"one of 'tcp', this worker runs 'mooncake'"):
        Segment.from_text(SEGMENT, "mooncake")


KEY = bytes(range(32))
frame_fields = st.builds(
    frames.Frame, st.just(7), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16)
)


@given(frame=frame_fields, bit=st.integers(0, frames.HEADER_BYTES * 8 - 1))
def test_a_header_with_any_bit_changed_is_refused(frame: frames.Frame, bit: int) -> None:
    header = bytearray(frames.pack(frame, KEY))
    assert frames.unpack(bytes(header), KEY, 7) == frame
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferError):
        frames.unpack(bytes(header), KEY, 7)


def test_a_repeated_frame_is_refused() -> None:
    header = frames.pack(frames.Frame(7, 0, 1, bytes(16)), KEY)
    with pytest.raises(TransferError, match="frame 7 came where 8 was due"):
        frames.unpack(header, KEY, 8)


def test_messages_are_refused_when_turned_back_repeated_or_from_a_stranger() -> None:
    ends = socket.socketpair()
    try:
        writer, reader = Talk(ends[0], KEY, is_writer=True), Talk(ends[1], KEY, is_writer=False)
        writer.send({"a": 1})
        assert reader.receive(5) == {"a": 1}
        for key, is_writer in (
            (KEY, False),
            (bytes(32), True),
            (KEY, True),
        ):  # turned back, another key, number 1 again
            Talk(ends[0], key, is_writer=is_writer).send({"a": 2})
            with pytest.raises(TransferError, match="without the connection's key"):
                reader.receive(5)
    finally:
        for end in ends:
            end.close()


@pytest.fixture
def listener() -> Iterator[tuple[TcpListener, mmap.mmap]]:
    memory = mmap.mmap(-1, SIZE)
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE)
    listener = TcpTransport(TransportOptions(secret="secret")).listen(region, Peer("P", "p"))
    yield listener, memory
    listener.close()


def ends_without_an_answer(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_frame_without_the_connections_key_ends_the_connection(listener: tuple[TcpListener, mmap.mmap]) -> None:
    listening, memory = listener
    listening.allow("t")
    sock, key = connect_and_prove(Segment.from_text(listening.segment, "tcp"), "secret")
    with sock:
        frame = frames.Frame(1, 0, 4, frames.ticket_key("t"))
        sock.sendall(frames.pack(frame, bytes(reversed(key))) + b"evil")
        assert ends_without_an_answer(sock)
    assert not any(memory[:])


def test_bytes_before_any_proof_end_the_connection(listener: tuple[TcpListener, mmap.mmap]) -> None:
    listening, memory = listener
    segment = Segment.from_text(listening.segment, "tcp")
    with socket.create_connection((segment.host, segment.port), timeout=10) as sock:
        assert sock.recv(100).startswith(MAGIC)
        sock.sendall(bytes(NONCE_BYTES + MAC_BYTES) + bytes(1000))
        assert ends_without_an_answer(sock)
    assert not any(memory[:])


def test_silent_connections_do_not_keep_the_writer_out_for_ever(listener: tuple[TcpListener, mmap.mmap]) -> None:
    listening, _ = listener
    segment = Segment.from_text(listening.segment, "tcp")
    crowd = [socket.create_connection((segment.host, segment.port), timeout=10) for _ in range(MAX_WAITING + 2)]
    deadline_s = time.monotonic() + 20
    while True:  # the first of the crowd is thrown out when its time for a proof is over
        try:
            sock, _ = connect_and_prove(segment, "secret")
            break
        except TransferError:
            assert time.monotonic() < deadline_s
    sock.close()
    for silent in crowd:
        silent.close()


def test_a_writer_that_stalls_in_a_frame_cannot_hold_up_revoking(listener: tuple[TcpListener, mmap.mmap]) -> None:
    listening, memory = listener
    listening.allow("t")
    sock, key = connect_and_prove(Segment.from_text(listening.segment, "tcp"), "secret")
    with sock:
        sock.sendall(frames.pack(frames.Frame(1, 0, SIZE, frames.ticket_key("t")), key) + b"\x01" * 100)
        deadline_s = time.monotonic() + 10
        while not memory[99]:
            assert time.monotonic() < deadline_s
        assert listening.revoke("t")
        assert ends_without_an_answer(sock)
    assert memory[:100] == b"\x01" * 100
    assert not any(memory[100:])


@pytest.mark.parametrize("name", ["tcp", "mooncake"])
def test_a_transport_without_a_secret_does_not_start(name: str) -> None:
    with pytest.raises(TransportUnavailable, match="secret"):
        load_transport(name, TransportOptions())


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(TransportUnavailable, match="'carrier-pigeon' is none of local, mooncake, nvlink, rdma, tcp"):
        load_transport("carrier-pigeon", TransportOptions(secret="x"))
    with pytest.raises(TransportUnavailable, match="no_such_module"):
        load_transport("no_such_module:Thing", TransportOptions(secret="x"))


def test_a_transport_of_ones_own_is_loaded_by_module_and_class() -> None:
    transport, note = load_transport("kvstore.transfer.local:LocalTransport", TransportOptions())
    assert (transport.name, note) == ("local", "")


def test_auto_falls_back_to_tcp_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvstore.transfer.mooncake as mooncake

    def missing() -> None:
        raise TransportUnavailable("libibverbs.so.1 is missing; apt-get install -y libibverbs1")

    monkeypatch.setattr(mooncake, "load_engine_class", missing)
    transport, note = load_transport("auto", TransportOptions(secret="x"))
    assert transport.name == "tcp"
    assert "libibverbs1" in note
