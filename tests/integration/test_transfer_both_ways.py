"""Two real transfer processes that write into each other's memory at once, as a hand-off and a pull of one pair do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.transfer import messages as m
from tests.integration.transfer_rig import Side

NUM_BLOCKS = 40


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    sides = Side("P"), Side("D")
    yield sides
    await asyncio.gather(*(side.stop() for side in sides))


def source_ids(side: Side) -> tuple[int, ...]:
    return tuple(range(NUM_BLOCKS)) if side.worker_id == "P" else tuple(range(5, 5 + NUM_BLOCKS))


def target_ids(side: Side) -> tuple[int, ...]:
    """Where a side takes what the other one sends; apart from what it sends itself."""
    return tuple(range(120, 120 - NUM_BLOCKS, -1))


async def send(writer: Side, reader: Side, ticket_id: str) -> None:
    """Open the reader's memory and push everything that the writer has."""
    reader.client.send(m.OpenListener(worker_id=writer.worker_id, epoch=writer.epoch))
    ready = await reader.wait(m.ListenerReady)
    assert not ready.error, ready.error
    reader.client.send(m.Allow(ticket_id=ticket_id, worker_id=writer.worker_id, epoch=writer.epoch))
    writer.client.send(m.OpenSource(seq_id=ticket_id, block_ids=source_ids(writer), ready_blocks=NUM_BLOCKS))
    writer.client.send(
        m.OpenTicket(
            ticket_id=ticket_id,
            seq_id=ticket_id,
            worker_id=reader.worker_id,
            epoch=reader.epoch,
            segment=ready.segment,
            geometry=reader.geometry.to_dict(),
            block_ids=target_ids(reader),
            skip_blocks=0,
        )
    )


async def check(writer: Side, reader: Side, ticket_id: str) -> None:
    pushed = await writer.wait(m.Pushed, lambda x: x.ticket_id == ticket_id)
    reader.client.send(m.Verify(ticket_id=ticket_id, extents=pushed.extents))
    assert (await reader.wait(m.Verified)).bad == ()
    for layer in range(writer.geometry.groups[0].num_layers):
        for source, target in zip(source_ids(writer), target_ids(reader), strict=True):
            assert writer.block(layer, source) == reader.block(layer, target)


@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
async def test_a_pair_writes_both_ways_at_once_and_a_fence_ends_both(sides: tuple[Side, Side], transport: str) -> None:
    p, d = sides
    await asyncio.gather(*(side.start(transport) for side in sides))
    for side in sides:
        for layer in range(side.geometry.groups[0].num_layers):
            side.fill(source_ids(side), layer, 0, NUM_BLOCKS)
    await asyncio.gather(send(p, d, "push"), send(d, p, "pull"))
    await asyncio.gather(check(p, d, "push"), check(d, p, "pull"))
    p.client.send(m.Fence(worker_id="D", epoch=d.epoch, forget=True))
    await p.wait(m.Fenced)
    p.client.send(m.CloseTicket(ticket_id="push"))
    assert (await p.wait(m.TicketClosed, lambda x: x.ticket_id == "push")).fenced
    p.client.send(m.Revoke(ticket_id="pull", worker_id="D", epoch=d.epoch))
    assert (await p.wait(m.TicketClosed, lambda x: x.ticket_id == "pull")).fenced  # nobody is let in any more
    await asyncio.gather(send(p, d, "push-2"), send(d, p, "pull-2"))  # and the pair may begin anew
    await asyncio.gather(check(p, d, "push-2"), check(d, p, "pull-2"))
