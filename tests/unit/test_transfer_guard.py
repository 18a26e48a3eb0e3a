"""The guard's packet filters, run by an interpreter of their instructions, and its table of connections."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer import guard

NET_OFF = 0xFFF00000


def run(program: list[guard.Instruction], packet: bytes) -> int:
    """What the kernel would return for a packet that begins with its IP header."""
    accumulator, at = 0, 0
    while True:
        code, jump_true, jump_false, k = program[at]
        at += 1
        if code == 0x06:
            return k
        if code in (0x20, 0x30):
            size = 4 if code == 0x20 else 1
            offset = k - NET_OFF
            if offset + size > len(packet):
                return 0
            accumulator = int.from_bytes(packet[offset : offset + size], "big")
        elif code == 0x74:
            accumulator >>= k
        else:
            assert code == 0x15
            at += jump_true if accumulator == k else jump_false


def packet_from(address: str) -> bytes:
    source = ipaddress.ip_address(address)
    if source.version == 4:
        return bytes([0x45]) + bytes(11) + source.packed + bytes(4)
    return bytes([0x60]) + bytes(7) + source.packed + bytes(16)


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(admitted=addresses, other=addresses)
def test_a_door_ajar_passes_one_address_and_no_other(admitted: str, other: str) -> None:
    program = guard.ajar_program(admitted)
    mapped = getattr(ipaddress.ip_address(admitted), "ipv4_mapped", None)
    assert run(program, packet_from(str(mapped or admitted)))
    assert bool(run(program, packet_from(other))) == (other == str(mapped or admitted))


@given(admitted=st.ip_addresses(v=6).map(str), bit=st.integers(0, 127))
def test_a_door_ajar_looks_at_every_bit_of_an_address(admitted: str, bit: int) -> None:
    if getattr(ipaddress.ip_address(admitted), "ipv4_mapped", None):
        return
    other = ipaddress.IPv6Address(int(ipaddress.ip_address(admitted)) ^ (1 << bit))
    assert not run(guard.ajar_program(admitted), packet_from(str(other)))


def test_a_mapped_ipv4_address_is_recognised_in_its_plain_packets() -> None:
    assert run(guard.ajar_program("::ffff:10.1.2.3"), packet_from("10.1.2.3"))


def test_a_shut_door_passes_nothing() -> None:
    assert run(guard.shut_program(), packet_from("127.0.0.1")) == 0


def test_a_listener_that_appears_is_shut_and_opened_for_an_address() -> None:
    with guard.opening:
        before = set(guard.own_sockets())
        server = socket.create_server(("127.0.0.1", 0))
        held = guard.Guard(before)
    port = server.getsockname()[1]
    assert held.ports == {port}
    with socket.socket() as kept_out:
        kept_out.settimeout(0.05)
        with pytest.raises(TimeoutError):
            kept_out.connect(("127.0.0.1", port))
    held.set_ajar("127.0.0.2")
    with socket.socket() as kept_out:
        kept_out.settimeout(0.05)
        with pytest.raises(TimeoutError):
            kept_out.connect(("127.0.0.1", port))
    held.set_ajar("127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as guest:
        held.shut()
        assert held.connected() == {guest.getsockname()}  # though nobody accepted it
        assert guard.own_connections({port}) == [guest.getsockname()]
        accepted, _ = server.accept()
        guest.sendall(b"still talking")
        assert accepted.recv(100) == b"still talking"
        accepted.close()
    held.close()
    server.close()


def test_a_listener_of_our_own_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = guard.Guard(set(guard.own_sockets()))
        assert held.ports == set()
        socket.create_connection(server.getsockname(), timeout=5).close()
        held.close()
