"""Transfer processes keep nothing: not from one fenced channel to the next, and not when they end."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from kvstore.errors import FailureKind
from kvstore.transfer import messages as m
from tests.faults.control import Faults, Rule
from tests.integration.transfer_rig import Pair, Side

pytestmark = pytest.mark.slow

NUM_BLOCKS = 6


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def holders_of(inode: int) -> list[str]:
    """Descriptors of any process that refer to this memory."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith("/memfd:") and link.stat().st_ino == inode:
                found.append(str(link))
        except (OSError, RuntimeError):
            continue  # it ended meanwhile
    return found


async def push(pair: Pair, number: int, last: type[m.Pushed] | type[m.PushFailed]) -> m.Pushed | m.PushFailed:
    """One prompt under a ticket of its own, up to this message; then both sides let go of it."""
    name = f"t{number}"
    segment = await pair.listen()
    pair.open_source(ready_blocks=NUM_BLOCKS, seq_id="s")
    pair.allow(name)
    pair.grant(segment, name)
    told = await pair.writer.wait(last, lambda x: x.ticket_id == name)
    pair.writer.client.send(m.CloseTicket(ticket_id=name))
    await pair.writer.wait(m.TicketClosed, lambda x: x.ticket_id == name)
    pair.writer.client.send(m.CloseSource(seq_id="s"))
    return told


def failures(side: Side) -> Counter[str]:
    found: Counter[str] = Counter()
    for message in side.messages:
        if isinstance(message, m.TransfersFailed):
            found[message.kind] += message.count
    return found


@pytest.mark.parametrize("inner", ["Tcp", pytest.param("Mooncake", marks=pytest.mark.slow)])
async def test_failed_writes_are_told_by_their_stage_and_leave_nothing_open(tmp_path: Path, inner: str) -> None:
    pair, faults = Pair(num_blocks=NUM_BLOCKS), Faults(tmp_path, num_layers=30)
    shared_memory = set(os.listdir("/dev/shm"))
    inodes = [os.fstat(side.fd).st_ino for side in (pair.writer, pair.reader)]
    try:
        await pair.start(f"tests.faults.transport:Faulty{inner}", device=str(faults.path), fence_after_ms=20)
        await push(pair, 0, m.Pushed)
        before = open_files(pair.writer.client.pid), open_files(pair.reader.client.pid)
        rules = {"fail_submit": FailureKind.SUBMIT, "fail_completion": FailureKind.COMPLETION}
        for number, (fault, kind) in enumerate(rules.items(), start=1):
            faults.set(Rule(fault=fault))
            failed = await push(pair, number, m.PushFailed)
            assert isinstance(failed, m.PushFailed)
            assert failed.kind == kind
            assert failures(pair.writer)[kind] > 0
        faults.set()
        await push(pair, 9, m.Pushed)
        after = open_files(pair.writer.client.pid), open_files(pair.reader.client.pid)
        assert max(b - a for a, b in zip(before, after, strict=True)) <= 2  # the log of faults
    finally:
        await pair.stop()
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert [holder for inode in inodes for holder in holders_of(inode)] == []
