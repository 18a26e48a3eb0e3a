"""Bytes that have left the writer and not reached the reader: what the kernel's buffers and a network hold.

A packet is a file in a folder beside the faults' file, addressed to one instance of a listener. It is landed by a
thread of the reader's process when it is due, if that listener is still open and lets its ticket in. A frozen reader
lands it when it wakes; a closed listener never does, nor does the one that is opened in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.transfer.base import Region
from tests.faults.control import Control

LOOK_S = 0.003
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    due_s: float
    ticket_id: str
    offset: int  # in the reader's memory
    flips: int = 0  # 0: the payload is written; else this is XORed to the byte at `offset`


def folder_of(control: Control) -> Path:
    assert control.path is not None
    folder = control.path.with_name("wire")
    folder.mkdir(exist_ok=True)
    return folder


def instance_of(control: Control, segment: str) -> str:
    """The listener that is open under this segment now; empty: none."""
    try:
        return (folder_of(control) / _door(segment)).read_text()
    except FileNotFoundError:
        return ""


def send(control: Control, instance: str, packet: Packet, payload: bytes = b"") -> Path:
    """Put a packet on the wire; the returned file is gone once it landed, was refused, or has nobody to land at."""
    path = folder_of(control) / f"{instance}-{os.getpid()}-{next(_numbers)}.packet"
    draft = path.with_suffix(".draft")
    draft.write_bytes(json.dumps(asdict(packet)).encode() + b"\n" + payload)
    draft.replace(path)
    if not _is_open(path.parent, instance):
        _drop(control, path)
    return path


def _is_open(folder: Path, instance: str) -> bool:
    for door in folder.glob("door-*"):
        with contextlib.suppress(FileNotFoundError):
            if door.read_text() == instance:
                return True
    return False


def _drop(control: Control, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        control.note("late_fenced")


def _door(segment: str) -> str:
    return "door-" + hashlib.sha256(segment.encode()).hexdigest()[:24]


class Landing:
    """The reader's end of the wire for one listener."""

    def __init__(self, control: Control, region: Region, segment: str) -> None:
        self._control = control
        self._region = region
        self._instance = secrets.token_hex(6)
        self._folder = folder_of(control)
        self._door = self._folder / _door(segment)
        self._allowed: set[str] = set()
        self._known: set[str] = set()  # allowed once; no transport lands anything of a ticket that never was
        self._lock = threading.Lock()  # held while bytes land, so that revoking and closing wait for them
        self._is_closed = threading.Event()
        draft = self._door.with_suffix(".draft")
        draft.write_text(self._instance)
        draft.replace(self._door)
        self._thread = threading.Thread(target=self._run, name="late-packets", daemon=True)
        self._thread.start()

    def allow(self, ticket_id: str) -> None:
        with self._lock:
            self._allowed.add(ticket_id)
            self._known.add(ticket_id)

    def revoke(self, ticket_id: str) -> None:
        with self._lock:
            self._allowed.discard(ticket_id)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        if self._door.exists() and self._door.read_text() == self._instance:
            self._door.unlink()
        for path in self._folder.glob(f"{self._instance}-*.packet"):
            _drop(self._control, path)

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            for path in sorted(self._folder.glob(f"{self._instance}-*.packet")):
                if self._is_closed.is_set():
                    return
                self._take(path)

    def _take(self, path: Path) -> None:
        head, _, payload = path.read_bytes().partition(b"\n")
        packet = Packet(**json.loads(head))
        if packet.due_s > time.monotonic():
            return
        rules = self._control.rules()
        knows_tickets = rules.first("unfenced") is None and rules.first("broken_fence") is None
        with self._lock:
            if packet.flips or packet.ticket_id in (self._allowed if knows_tickets else self._known):
                self._land(packet, payload)
                event = "flipped" if packet.flips else "late_landed"
            else:
                event = "late_refused"
        self._control.note(event, ticket=packet.ticket_id, offset=packet.offset)
        path.unlink()

    def _land(self, packet: Packet, payload: bytes) -> None:
        address = self._region.address + packet.offset
        if packet.flips:
            payload = bytes([ctypes.string_at(address, 1)[0] ^ packet.flips])
        ctypes.memmove(address, payload, len(payload))
