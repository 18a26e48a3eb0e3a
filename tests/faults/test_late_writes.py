"""Bytes of a ticket that is over may arrive late; nobody who got its blocks afterwards ever sees them.

The writer's channel ends without the reader's word, and what it had on the wire lands later, as Mooncake's writes do
when a peer is frozen or slow. With the rule `unfenced` the reader's transport cannot forbid a single ticket, so that
only closing its listener helps.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from kvstore.transfer import messages as m
from tests.faults.control import Faults, Rule
from tests.faults.rig import Disturbed
from tests.integration.transfer_rig import Pair

pytestmark = pytest.mark.slow

NUM_BLOCKS = 6
FOREIGN = b"\x77" * 64
SLOW = [pytest.mark.slow, pytest.mark.timeout(2400)]
ROUNDS = [
    pytest.param("Tcp", 10, id="tcp-10"),
    pytest.param("Tcp", 200, id="tcp-200", marks=SLOW),
    pytest.param("Mooncake", 2, id="mooncake-2", marks=SLOW),
    pytest.param("Mooncake", 200, id="mooncake-200", marks=SLOW),
]


class Late:
    """A pair of transfer processes, one ticket after another."""

    def __init__(self, folder: Path) -> None:
        self.pair = Pair(num_blocks=NUM_BLOCKS)
        self.faults = Faults(folder, self.pair.num_layers)
        self.number = 0

    async def start(self, inner: str) -> None:
        transport = f"tests.faults.transport:Faulty{inner}"
        await self.pair.start(transport, device=str(self.faults.path), fence_after_ms=20)

    @property
    def name(self) -> str:
        return f"t{self.number}"

    async def begin(self, *rules: Rule) -> None:
        """A new prompt, all of it computed; its ticket is open and its writes are on their way."""
        pair = self.pair
        self.number += 1
        self.faults.set(*rules)
        segment = await pair.listen()
        pair.writer.client.send(m.OpenSource(seq_id=self.name, block_ids=pair.source_ids, ready_blocks=0))
        pair.allow(self.name)
        ticket = pair.ticket(segment, self.name)
        pair.writer.client.send(
            m.OpenTicket(**{f: getattr(ticket, f) for f in ticket.__slots__ if f != "seq_id"}, seq_id=self.name)
        )
        step = pair.begin_chunk(0, NUM_BLOCKS, self.name)
        for layer in range(pair.num_layers):
            pair.compute_layer(layer, 0, NUM_BLOCKS)
        assert step == pair.step
        pair.end_chunk()

    async def end_at_writer(self) -> bool:
        """The source may be reused when this returns; True: the writer vouches for the reader's side too."""
        self.pair.writer.client.send(m.CloseTicket(ticket_id=self.name))
        closed = await self.pair.writer.wait(m.TicketClosed, lambda x: x.ticket_id == self.name)
        self.pair.writer.client.send(m.CloseSource(seq_id=self.name))
        return closed.fenced

    async def end_at_reader(self, is_vouched_for: bool) -> None:
        """The target may be reused when this returns, by the rules of a decode worker."""
        reader, epoch = self.pair.reader, self.pair.writer.epoch
        reader.client.send(m.Revoke(ticket_id=self.name, worker_id="P", epoch=epoch))
        closed = await reader.wait(m.TicketClosed, lambda x: x.ticket_id == self.name)
        if not closed.fenced and not is_vouched_for:
            reader.client.send(m.Fence(worker_id="P", epoch=epoch))
            await reader.wait(m.Fenced)

    async def until_nothing_is_on_the_wire(self) -> None:
        folder = self.faults.path.with_name("wire")
        await self.pair.reader.until(lambda: not list(folder.glob("*.packet")), "packets are left")

    def reuse(self, side: str) -> None:
        """The blocks have a new owner, whose bytes can be told from all others."""
        worker = self.pair.writer if side == "writer" else self.pair.reader
        ids = self.pair.source_ids if side == "writer" else self.pair.target_ids
        size = worker.geometry.groups[0].block_bytes
        for layer in range(self.pair.num_layers):
            for block in ids:
                worker.memory[worker.span(layer, block)] = FOREIGN * (size // len(FOREIGN))


@pytest.fixture
async def late(tmp_path: Path) -> AsyncIterator[Late]:
    late = Late(tmp_path)
    yield late
    await late.pair.stop()


@pytest.mark.parametrize(("inner", "rounds"), ROUNDS)
async def test_target_blocks_that_are_reused_never_change_again(late: Late, inner: str, rounds: int) -> None:
    rng = random.Random(rounds)
    await late.start(inner)
    for number in range(rounds):
        rules = [Rule(fault="delay", share=rng.uniform(0.3, 1), seconds=10)]
        rules.append(Rule(fault="unconfirmed_close", seconds=rng.choice((0.0, 0.02, 0.1))))
        if number % 2:
            rules.append(Rule(fault="unfenced"))
        await late.begin(*rules)
        await asyncio.sleep(rng.uniform(0, 0.03))
        ends = [late.end_at_writer()] if number % 3 else []  # else the reader ends first, and the writer is told
        is_vouched_for = all(await asyncio.gather(*ends)) if ends else False
        await late.end_at_reader(is_vouched_for)
        late.reuse("reader")
        owned = bytes(late.pair.reader.memory)
        if not ends:
            await late.end_at_writer()
        await late.until_nothing_is_on_the_wire()
        assert bytes(late.pair.reader.memory) == owned, f"round {number}"
        late.pair.reader.messages.clear()
        late.pair.writer.messages.clear()
    counts = late.faults.counts()
    assert counts["left_on_wire"] >= rounds
    assert counts["late_refused"] + counts["late_fenced"] >= rounds / 2


async def test_a_transport_whose_fence_is_a_lie_is_found_out(late: Late) -> None:
    """The test above sees late bytes where there are any."""
    await late.start("Tcp")
    await late.begin(
        Rule(fault="delay", seconds=10), Rule(fault="unconfirmed_close", seconds=0.3), Rule(fault="broken_fence")
    )
    await asyncio.sleep(0.05)
    await late.end_at_writer()
    await late.end_at_reader(False)
    late.reuse("reader")
    owned = bytes(late.pair.reader.memory)
    await late.until_nothing_is_on_the_wire()
    assert bytes(late.pair.reader.memory) != owned


@pytest.mark.parametrize(("inner", "rounds"), ROUNDS)
async def test_a_reader_that_wakes_up_gets_nothing_of_the_sources_next_owner(
    late: Late, inner: str, rounds: int
) -> None:
    rng = random.Random(rounds)
    await late.start(inner)
    for number in range(rounds):
        rules = [Rule(fault="delay", share=0.5, seconds=rng.uniform(0.0, 0.1))]
        if number % 2:
            rules = [Rule(fault="late", share=0.3, seconds=rng.uniform(0.0, 0.1))]
        await late.begin(*rules)
        await asyncio.sleep(rng.uniform(0, 0.03))
        os.kill(late.pair.reader.client.pid, signal.SIGSTOP)
        ending = asyncio.create_task(late.end_at_writer())
        frozen_s = 3.0 if number % 20 == 9 else rng.uniform(0, 0.3)  # the long ones outlast every confirmation
        try:
            await asyncio.wait([ending], timeout=frozen_s)
            if ending.done():
                late.reuse("writer")
        finally:
            os.kill(late.pair.reader.client.pid, signal.SIGCONT)
        is_vouched_for = await ending
        late.reuse("writer")
        await late.end_at_reader(is_vouched_for)
        await late.until_nothing_is_on_the_wire()
        assert FOREIGN not in late.pair.reader.memory[:], f"round {number}"
        late.pair.reader.messages.clear()
        late.pair.writer.messages.clear()
    assert late.faults.counts()["held_fenced"] > 0


# --- the whole cluster ---


def transfer_process(disturbed: Disturbed, name: str) -> psutil.Process:
    children = psutil.Process(disturbed.cluster.processes[name].pid).children(recursive=True)
    return next(c for c in children if "kvstore.transfer.process" in c.cmdline())


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=SLOW)])
async def test_who_gets_the_blocks_of_an_aborted_transfer_answers_right(disturbed: Disturbed, rounds: int) -> None:
    rng = random.Random(rounds)
    reader = transfer_process(disturbed, "decode-0")
    left = disturbed.faults.counts()["left_on_wire"]
    async with disturbed.client() as client:
        for number in range(rounds):
            rules = [Rule(fault="delay", share=0.7, times=12, seconds=2.0)]
            rules.append(Rule(fault="unconfirmed_close", times=1, seconds=rng.uniform(0, 0.3)))
            if number % 2:
                rules.append(Rule(fault="unfenced"))
            disturbed.faults.set(*rules)
            aborted = asyncio.create_task(disturbed.ask(client, disturbed.prompt(400), 24))
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            if number % 3 == 0:
                reader.suspend()
            aborted.cancel()
            victim = asyncio.create_task(disturbed.ask(client, disturbed.prompt(300), 24))
            try:
                await asyncio.wait([victim], timeout=rng.uniform(0, 0.5) if number % 3 == 0 else 0)
            finally:
                reader.resume()
            assert await victim == "", f"round {number}"
            await asyncio.wait([aborted])
    await disturbed.assert_right_afterwards()
    assert disturbed.faults.counts()["left_on_wire"] > left
