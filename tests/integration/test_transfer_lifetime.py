"""How a transfer process starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import TransportUnavailable
from kvstore.transfer import messages as m
from kvstore.transfer.process import EXIT_STUCK
from tests.integration.transfer_rig import Pair, Side


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    side = Side("P", num_blocks=8)
    yield side
    await side.stop()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_it_says_which_transport_it_runs(side: Side) -> None:
    started = await side.start("tcp")
    assert started == m.Started(pid=side.client.pid, transport="tcp")


async def test_auto_means_mooncake_where_it_can_be_guarded(side: Side) -> None:
    assert await side.start("auto") == m.Started(pid=side.client.pid, transport="mooncake", spares=("tcp",))


async def test_a_transport_that_cannot_run_is_named_and_leaves_no_process(side: Side) -> None:
    with pytest.raises(TransportUnavailable, match="carrier-pigeon"):
        await side.start("carrier-pigeon")
    await side.until(lambda: not is_running(side.client.pid), "it still runs")


async def test_without_a_secret_it_does_not_start(side: Side) -> None:
    with pytest.raises(TransportUnavailable, match="secret"):
        await side.start("tcp", secret="")


async def test_sigterm_ends_it(side: Side) -> None:
    await side.start("tcp")
    os.kill(side.client.pid, signal.SIGTERM)
    await side.until(lambda: side.exit_code is not None, "it did not end")
    assert side.exit_code == -signal.SIGTERM


async def test_it_ends_when_its_pipe_is_closed(side: Side) -> None:
    await side.start("tcp")
    await side.client.stop()
    assert side.exit_code == 0


def test_it_dies_with_its_parent() -> None:
    code = """
import asyncio, os
from tests.integration.transfer_rig import Side
async def main():
    side = Side("P", num_blocks=8)
    await side.start("tcp")
    os.write(1, str(side.client.pid).encode())
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    pid, deadline_s = int(done.stdout), time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline_s, "it outlived its parent"


def test_it_never_imports_torch() -> None:
    code = "import sys, kvstore.transfer.process, kvstore.transfer.mooncake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


async def test_a_channel_that_cannot_be_closed_ends_the_process() -> None:
    pair = Pair(num_blocks=6)
    try:
        await pair.writer.start("tests.integration.stuck_transport:StuckTransport")
        pair.open_source()
        pair.grant("anything")
        pair.compute(0, 6)
        pair.writer.client.send(m.Fence(worker_id="D", epoch=pair.reader.epoch))
        await pair.writer.until(lambda: pair.writer.exit_code is not None, "it did not end")
        assert pair.writer.exit_code == EXIT_STUCK
    finally:
        await pair.stop()


async def test_a_thread_that_fails_ends_the_process_instead_of_leaving_its_peer_to_wait() -> None:
    pair = Pair(num_blocks=6)
    try:
        await pair.writer.start("tests.integration.stuck_transport:BrokenTransport")
        pair.open_source()
        pair.grant("anything")
        pair.compute(0, 6)
        await pair.writer.until(lambda: pair.writer.exit_code is not None, "it did not end")
        assert pair.writer.exit_code == EXIT_STUCK
    finally:
        await pair.stop()


async def test_a_message_that_means_nothing_here_is_survived(side: Side) -> None:
    await side.start("tcp")
    side.client.send(m.Started(pid=1, transport="x"))
    side.client.send(m.CloseTicket(ticket_id="t"))
    assert await side.wait(m.TicketClosed) == m.TicketClosed(ticket_id="t", fenced=True)
