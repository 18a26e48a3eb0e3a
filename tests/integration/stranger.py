"""A process that knows everything about a reader's Mooncake but the secret. Prints what it got as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
from typing import Any

NUM_BYTES = 4096
READ, WRITE = 0, 1


def try_engine(target: str, address: int) -> dict[str, int]:
    """Return codes of a read and a write through an engine of its own; 0 is success."""
    from mooncake.engine import TransferEngine

    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    buffer = ctypes.create_string_buffer(b"\x66" * NUM_BYTES, NUM_BYTES)
    mine = ctypes.addressof(buffer)
    engine.register_memory(mine, NUM_BYTES)
    return {
        "write": engine.transfer_sync_write(target, mine, address, NUM_BYTES),
        "read": engine.transfer_sync_read(target, mine, address, NUM_BYTES),
    }


def try_socket(port: int, address: int, opcode: int) -> str:
    """One request in Mooncake's own wire format, straight to its data port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.3) as sock:
            sock.sendall(struct.pack("<QQB7x", NUM_BYTES, address, opcode))
            if opcode == WRITE:
                sock.sendall(b"\x66" * NUM_BYTES)
            return f"answered {sock.recv(16).hex()}"
    except OSError as exc:
        return type(exc).__name__


def main() -> None:
    target, ports, address = sys.argv[1], [int(p) for p in sys.argv[2].split(",") if p], int(sys.argv[3])
    result: dict[str, Any] = {"engine": try_engine(target, address)}
    result["sockets"] = [try_socket(port, address, opcode) for port in ports for opcode in (READ, WRITE)]
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
