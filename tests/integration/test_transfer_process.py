"""Two real transfer processes hand a prompt over while the test computes it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvstore.transfer import messages as m
from tests.integration.transfer_rig import Pair

CHUNKS = ((0, 32), (32, 32), (64, 30))


@pytest.fixture(params=["tcp", pytest.param("mooncake", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["tcp", "mooncake"])
def each_transport(request: pytest.FixtureRequest) -> str:
    """For what a transport could get wrong by itself."""
    return str(request.param)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.stop()


async def test_a_prompt_in_three_chunks_arrives_byte_for_byte(pair: Pair, each_transport: str) -> None:
    await pair.start(each_transport)
    pair.open_source()
    segment = await pair.listen()
    pair.compute(*CHUNKS[0])
    pair.allow()
    pair.grant(segment)
    pair.compute(*CHUNKS[1])
    pair.compute(*CHUNKS[2])
    pushed = await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []
    assert pushed.num_bytes == 94 * 30 * 12288
    pair.reader.client.send(m.Verify(ticket_id="t", extents=pushed.extents))
    assert (await pair.reader.wait(m.Verified)).bad == ()
    assert {trace.layer for trace in pushed.layers} == set(range(30))


async def test_a_grant_before_computing_pushes_each_chunk_as_it_comes(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    for chunk in CHUNKS:
        pair.compute(*chunk)
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_a_grant_after_computing_pushes_everything_at_once(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.open_source()
    for chunk in CHUNKS:
        pair.compute(*chunk)
    pair.allow()
    pair.grant(segment)
    pushed = await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []
    assert len(pushed.layers) == 30  # chunks of a layer are merged


async def test_progress_may_overtake_the_source_that_it_belongs_to(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.compute(*CHUNKS[0])
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(*CHUNKS[1])
    pair.compute(*CHUNKS[2])
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_blocks_that_the_reader_has_are_not_written(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    for layer in range(30):
        pair.writer.fill(pair.source_ids, layer, 0, 50)
        pair.reader.fill(pair.target_ids, layer, 0, 40)
    kept = {i: pair.reader.block(7, pair.target_ids[i]) for i in range(40)}
    pair.open_source(ready_blocks=50)
    pair.allow()
    pair.grant(segment, skip_blocks=40)
    pair.compute(50, 44)
    pushed = await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks(first=40) == []
    assert {i: pair.reader.block(7, pair.target_ids[i]) for i in range(40)} == kept
    assert pushed.num_bytes == 54 * 30 * 12288


async def test_a_flipped_byte_is_found_and_sent_again(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    pushed = await pair.writer.wait(m.Pushed)
    at = pair.reader.span(11, pair.target_ids[60]).start + 77
    pair.reader.memory[at] ^= 1
    pair.reader.client.send(m.Verify(ticket_id="t", extents=pushed.extents))
    bad = (await pair.reader.wait(m.Verified)).bad
    assert [e.layer for e in bad] == [11]
    assert bad[0].block <= pair.target_ids[60] < bad[0].block + bad[0].count
    pair.writer.client.send(m.Resend(ticket_id="t", extents=bad))
    again = await pair.writer.wait(m.Pushed)
    assert again.extents == bad
    pair.reader.client.send(m.Verify(ticket_id="t", extents=pushed.extents))
    assert (await pair.reader.wait(m.Verified)).bad == ()
    assert pair.differing_blocks() == []


async def test_the_same_source_goes_to_another_reader_when_the_first_is_killed(pair: Pair, transport: str) -> None:
    lost = Pair()
    try:
        await lost.reader.start(transport)
        await pair.start(transport, throttle_bytes_per_s=40 << 20)
        lost.reader.client.send(m.OpenListener(worker_id="P", epoch=pair.writer.epoch))
        first = (await lost.reader.wait(m.ListenerReady)).segment
        lost.reader.client.send(m.Allow(ticket_id="first", worker_id="P", epoch=pair.writer.epoch))
        pair.open_source()
        pair.writer.client.send(pair.ticket(first, "first", epoch="lost"))
        pair.compute(0, 94)
        await pair.reader.until(lambda: any(lost.reader.block(0, pair.target_ids[93])), "nothing landed")
        lost.reader.client.kill()
        await pair.writer.wait(m.PushFailed, lambda x: x.ticket_id == "first")
        segment = await pair.listen()
        pair.allow("second")
        pair.grant(segment, "second")
        pair.writer.client.send(m.CloseTicket(ticket_id="first"))
        assert (await pair.writer.wait(m.TicketClosed)).ticket_id == "first"
        await pair.writer.wait(m.Pushed, lambda x: x.ticket_id == "second")
        assert pair.differing_blocks() == []
    finally:
        await lost.stop()


async def test_nothing_of_a_closed_ticket_lands_afterwards(pair: Pair, each_transport: str) -> None:
    await pair.start(each_transport, throttle_bytes_per_s=40 << 20)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    await pair.reader.until(lambda: any(pair.reader.block(3, pair.target_ids[93])), "nothing landed")
    pair.writer.client.send(m.CloseTicket(ticket_id="t"))
    closed = await pair.writer.wait(m.TicketClosed)
    assert closed.fenced
    pair.writer.client.send(m.CloseSource(seq_id="s"))
    landed = bytes(pair.reader.memory)
    for layer in range(30):  # the blocks have a new owner
        pair.writer.fill(pair.source_ids, layer, 0, 94)
    pair.reader.client.send(m.OpenListener(worker_id="P", epoch=pair.writer.epoch))
    await pair.reader.wait(m.ListenerReady)
    pair.reader.client.send(m.Fence(worker_id="P", epoch=pair.writer.epoch))
    await pair.reader.wait(m.Fenced)
    assert bytes(pair.reader.memory) == landed


async def test_closing_to_a_frozen_reader_says_that_bytes_may_still_land(pair: Pair, each_transport: str) -> None:
    await pair.start(each_transport)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 32)
    await pair.reader.until(lambda: any(pair.reader.block(29, pair.target_ids[31])), "the first chunk did not land")
    os.kill(pair.reader.client.pid, signal.SIGSTOP)
    try:
        pair.compute(32, 62)  # far more than the kernel's buffers hold
        old = [pair.writer.block(layer, pair.source_ids[93]) for layer in range(30)]
        pair.writer.client.send(m.CloseTicket(ticket_id="t"))
        closed = await pair.writer.wait(m.TicketClosed)
    finally:
        os.kill(pair.reader.client.pid, signal.SIGCONT)
    assert not closed.fenced
    for layer in range(30):  # the writer's blocks have a new owner at once
        pair.writer.fill(pair.source_ids, layer, 0, 94)
    pair.reader.client.send(m.Revoke(ticket_id="t", worker_id="P", epoch=pair.writer.epoch))
    await pair.reader.wait(m.TicketClosed)
    pair.reader.client.send(m.Fence(worker_id="P", epoch=pair.writer.epoch))
    await pair.reader.wait(m.Fenced)
    landed = [pair.reader.block(layer, pair.target_ids[93]) for layer in range(30)]
    assert all(got in (old[layer], bytes(12288)) for layer, got in enumerate(landed))


async def test_a_frozen_reader_does_not_hold_up_another(pair: Pair, transport: str) -> None:
    frozen = Pair()
    try:
        await asyncio.gather(pair.start(transport), frozen.reader.start(transport))
        frozen.reader.client.send(m.OpenListener(worker_id="P", epoch=pair.writer.epoch))
        stuck = (await frozen.reader.wait(m.ListenerReady)).segment
        segment = await pair.listen()
        os.kill(frozen.reader.client.pid, signal.SIGSTOP)
        pair.open_source()
        pair.allow()
        pair.writer.client.send(pair.ticket(stuck, "stuck", epoch="frozen"))
        pair.grant(segment)
        pair.compute(0, 94)
        await pair.writer.wait(m.Pushed, lambda x: x.ticket_id == "t")
        assert pair.differing_blocks() == []
    finally:
        frozen.reader.client.kill()
        await frozen.stop()


async def test_a_revoked_ticket_fails_at_the_writer(pair: Pair, each_transport: str) -> None:
    await pair.start(each_transport, throttle_bytes_per_s=40 << 20)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    await pair.reader.until(lambda: any(pair.reader.block(0, pair.target_ids[93])), "nothing landed")
    pair.reader.client.send(m.Revoke(ticket_id="t", worker_id="P", epoch=pair.writer.epoch))
    revoked = await pair.reader.wait(m.TicketClosed)
    if not revoked.fenced:
        pair.reader.client.send(m.Fence(worker_id="P", epoch=pair.writer.epoch, forget=True))
        await pair.reader.wait(m.Fenced)
    landed = bytes(pair.reader.memory)
    await pair.writer.wait(m.PushFailed)
    pair.writer.client.send(m.CloseTicket(ticket_id="t"))
    await pair.writer.wait(m.TicketClosed)
    assert bytes(pair.reader.memory) == landed


async def test_a_killed_reader_fails_the_push_and_lets_the_ticket_close(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 32)
    await pair.reader.until(lambda: any(pair.reader.block(29, pair.target_ids[31])), "the first chunk did not land")
    pair.reader.client.kill()
    await pair.reader.until(lambda: pair.reader.exit_code is not None, "it did not end")
    pair.compute(32, 62)
    await pair.writer.wait(m.PushFailed)
    pair.writer.client.send(m.CloseTicket(ticket_id="t"))
    await pair.writer.wait(m.TicketClosed)


async def test_the_readers_fence_lets_live_tickets_finish(pair: Pair, each_transport: str) -> None:
    await pair.start(each_transport, throttle_bytes_per_s=40 << 20)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    await pair.reader.until(lambda: any(pair.reader.block(2, pair.target_ids[93])), "nothing landed")
    pair.reader.client.send(m.Fence(worker_id="P", epoch=pair.writer.epoch))
    fenced = await pair.reader.wait(m.Fenced)
    assert fenced.segment == segment
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_the_writers_fence_lets_live_tickets_finish(pair: Pair, transport: str) -> None:
    await pair.start(transport, throttle_bytes_per_s=40 << 20)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    await pair.reader.until(lambda: any(pair.reader.block(2, pair.target_ids[93])), "nothing landed")
    pair.writer.client.send(m.Fence(worker_id="D", epoch=pair.reader.epoch))
    await pair.writer.wait(m.Fenced)
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_a_layer_lands_while_later_layers_are_still_computed(pair: Pair, transport: str) -> None:
    await pair.start(transport, throttle_bytes_per_s=50 << 20)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(*CHUNKS[0])
    pair.compute(*CHUNKS[1])
    pair.begin_chunk(*CHUNKS[2])
    for layer in range(29):
        pair.compute_layer(layer, *CHUNKS[2])
    expected = pair.writer.block(0, pair.source_ids[93])
    await pair.reader.until(lambda: pair.reader.block(0, pair.target_ids[93]) == expected, "layer 0 did not land")
    assert not any(isinstance(x, m.Pushed) for x in pair.writer.messages)
    pair.compute_layer(29, *CHUNKS[2])
    pair.end_chunk()
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_without_layerwise_a_chunk_lands_only_after_its_end(pair: Pair, transport: str) -> None:
    await pair.start(transport, layerwise=False)
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.begin_chunk(0, 94)
    for layer in range(30):
        pair.compute_layer(layer, 0, 94)
    # An answered message behind the progress: when it is back, the progress has been read.
    pair.writer.client.send(m.CloseTicket(ticket_id="another"))
    await pair.writer.wait(m.TicketClosed)
    assert not any(pair.reader.block(0, pair.target_ids[93]))
    pair.end_chunk()
    await pair.writer.wait(m.Pushed)
    assert pair.differing_blocks() == []


async def test_without_the_secret_a_push_fails_and_nothing_lands(pair: Pair, transport: str) -> None:
    await pair.reader.start(transport)
    await pair.writer.start(transport, secret="another secret")
    segment = await pair.listen()
    pair.open_source()
    pair.allow()
    pair.grant(segment)
    pair.compute(0, 94)
    await pair.writer.wait(m.PushFailed)
    assert not any(pair.reader.memory[::4096])


async def test_a_ticket_for_an_unequal_layout_fails_and_names_both_values(pair: Pair, transport: str) -> None:
    await pair.start(transport)
    segment = await pair.listen()
    pair.open_source()
    ticket = pair.ticket(segment)
    geometry = pair.reader.geometry.to_dict()
    geometry["groups"] = [{**geometry["groups"][0], "block_size": 32}]
    pair.writer.client.send(replace(ticket, geometry=geometry))
    failed = await pair.writer.wait(m.PushFailed)
    assert "16 here, 32 there" in failed.message
