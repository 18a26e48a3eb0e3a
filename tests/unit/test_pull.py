"""Sending KV back between a real reader and a real holder over real gRPC: order, ends, and what must never happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstore.transfer import messages as t
from services import config as settings
from services.decode.reader import Reader
from services.engine import messages as m
from services.prefill.writer import Writer
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from tests.unit.handoff_rig import config, left_out, start_half
from tests.unit.pull_rig import GOOD, HELD, WANTED, PullPair

ARROWS = ("requested", "granted", "receiving", "verifying", "resending", "committed", "revoked", "quarantined", "freed")


def decode_role(core: WorkerCore) -> Reader:
    return Reader(core, takes_prompts=False)


async def start(conf: settings.ServeConfig | None = None, d_fingerprint: dict[str, Any] | None = None) -> PullPair:
    conf = conf or config()
    return PullPair(
        p=await start_half("prefill", Writer, conf, "pe"),
        d=await start_half("decode", decode_role, conf, "de", **(d_fingerprint or {})),
    )


@pytest.fixture
async def pair() -> AsyncIterator[PullPair]:
    pair = await start()
    yield pair
    await pair.stop()


def arrows(pair: PullPair, half: str) -> list[str]:
    names = [x.removeprefix("pull_") for x in getattr(pair, half).arrows() if x.startswith("pull_")]
    return [x for x in names if x in ARROWS]


async def test_a_pull_follows_the_table_on_both_sides_and_lets_go_of_everything(pair: PullPair) -> None:
    seq_id = await pair.ask()
    allowed = await pair.listen()
    await pair.pin()
    source = await pair.d.sent(t.OpenSource)
    assert (source.block_ids, source.ready_blocks) == (HELD[1:], 3)  # P has the first itself
    ticket = await pair.d.sent(t.OpenTicket)
    assert (ticket.ticket_id, ticket.block_ids, ticket.skip_blocks) == (allowed.ticket_id, WANTED, 0)
    assert (ticket.worker_id, ticket.epoch, ticket.segment) == ("prefill-0", "pe", "segment")
    pair.push(ticket.ticket_id)
    assert (await pair.p.sent(t.Verify)).extents == GOOD
    assert pair.p.none_sent(m.Loaded, "engine")
    await pair.check()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=3)
    await pair.released()
    for half in ("p", "d"):
        assert arrows(pair, half) == ["requested", "granted", "receiving", "verifying", "committed"]
    assert (pair.p.core.load().pulls, pair.p.core.load().pulled_blocks, pair.p.core.load().pulls_failed) == (1, 3, 0)
    await pair.p.until(lambda: not pair.leftovers())


async def test_the_holder_is_asked_by_the_whole_chain_of_names(pair: PullPair) -> None:
    await pair.ask()
    await pair.listen()
    pins = await pair.d.sent(m.PinBlocks, "engine")
    assert pins.names == tuple(bytes([i]) * 16 for i in range(4))


async def test_the_prompt_is_computed_from_what_the_holder_still_has(pair: PullPair) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend(HELD[:2])
    assert ticket.block_ids == WANTED[:1]
    pair.push(ticket.ticket_id, tuple(t.Extent(layer=i, block=30, count=1) for i in range(2)))
    await pair.check()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=1)


async def test_a_holder_that_has_evicted_everything_costs_no_quarantine(pair: PullPair) -> None:
    seq_id = await pair.ask()
    await pair.listen()
    await pair.pin(())
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0)
    await pair.d.sent(m.ReleaseSequence, "engine")
    assert pair.d.none_sent(t.OpenTicket)
    assert pair.p.core.load().pulls_failed == 1
    await pair.p.until(lambda: not pair.leftovers())


async def test_a_bad_extent_is_sent_again_once_and_then_used(pair: PullPair) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend()
    pair.push(ticket.ticket_id)
    await pair.check(GOOD[1:])
    assert (await pair.d.sent(t.Resend)).extents == GOOD[1:]
    pair.push(ticket.ticket_id, GOOD[1:])
    await pair.check(skip=1)
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=3)
    for half in ("p", "d"):
        assert arrows(pair, half).count("resending") == 1


async def test_an_extent_that_is_bad_twice_gives_the_pull_up(pair: PullPair) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend()
    pair.push(ticket.ticket_id)
    await pair.check(GOOD[1:])
    await pair.d.sent(t.Resend)
    pair.push(ticket.ticket_id, GOOD[1:])
    await pair.check(GOOD[1:], skip=1)
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    assert not pair.p.outputs()  # the client never hears of it
    pair.closed(pair.d, (await pair.d.sent(t.CloseTicket)).ticket_id, fenced=True)
    assert (await pair.p.sent(m.Unquarantine, "engine")).seq_id == seq_id
    await pair.released()


async def test_other_extents_than_the_bad_ones_do_not_repair_a_pull(pair: PullPair) -> None:
    await pair.ask()
    ticket = await pair.lend()
    pair.push(ticket.ticket_id)
    await pair.check(GOOD[1:])
    await pair.d.sent(t.Resend)
    pair.push(ticket.ticket_id, GOOD[:1])
    assert (await pair.loaded()).count == 0


async def test_a_reply_that_does_not_cover_the_blocks_is_not_used(pair: PullPair) -> None:
    await pair.ask()
    ticket = await pair.lend()
    pair.push(ticket.ticket_id, (*GOOD[:1], t.Extent(layer=1, block=30, count=2)))
    assert (await pair.loaded()).count == 0
    assert pair.p.none_sent(t.Verify)


async def test_a_holder_that_gets_an_impossible_message_lets_go_of_the_blocks(pair: PullPair) -> None:
    await pair.ask()
    ticket = await pair.lend()
    pair.push(ticket.ticket_id)
    pair.push(ticket.ticket_id)
    await pair.d.sent(t.CloseTicket)
    pair.closed(pair.d, ticket.ticket_id, fenced=True)
    await pair.released()


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_push_that_fails_quarantines_until_somebody_vouches(pair: PullPair, fenced: bool) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend()
    pair.d.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the wire broke"))
    await pair.d.sent(t.CloseTicket)
    pair.closed(pair.d, ticket.ticket_id, fenced=fenced)
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    await pair.released()
    if not fenced:
        pair.closed(pair.p, (await pair.p.sent(t.Revoke)).ticket_id, fenced=False)
        fence = await pair.p.sent(t.Fence)
        assert not fence.forget
        assert pair.p.none_sent(m.Unquarantine, "engine")
        pair.p.core.role.on_transfer(t.Fenced(worker_id=fence.worker_id, epoch=fence.epoch, segment="segment"))
    await pair.p.sent(m.Unquarantine, "engine")
    await pair.p.until(lambda: not pair.leftovers())


async def test_a_holder_that_takes_too_long_is_given_up_and_the_prompt_is_computed() -> None:
    pair = await start(config(**{"transfer.pull_ms": 200}))
    seq_id = await pair.ask()
    ticket = await pair.lend()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    pair.closed(pair.d, (await pair.d.sent(t.CloseTicket)).ticket_id, fenced=True)
    await pair.p.sent(m.Unquarantine, "engine")
    assert pair.p.core.load().pulls_failed == 1
    late = await pair.d.core.role.end_pull(worker_pb2.EndPullRequest(ticket_id=ticket.ticket_id, holder_epoch="de"))
    assert late.fenced
    await pair.p.until(lambda: not pair.leftovers())
    await pair.stop()


async def test_a_listener_that_does_not_open_in_time_leaves_nothing_to_fence() -> None:
    pair = await start(config(**{"transfer.pull_ms": 100}))
    seq_id = await pair.ask()
    await pair.p.sent(t.OpenListener)
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0)
    assert pair.d.none_sent(m.PinBlocks, "engine")
    await pair.p.until(lambda: not pair.leftovers())
    await pair.stop()


async def test_an_abort_while_pulling_quarantines_until_the_holder_has_stopped(pair: PullPair) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend()
    await pair.p.core.abort("r", 0, "the client left")
    assert await pair.p.sent(m.AbortSequence, "engine") == m.AbortSequence(seq_id=seq_id, quarantine=True)
    assert pair.p.none_sent(m.Unquarantine, "engine")
    closed = await pair.d.sent(t.CloseTicket)
    pair.closed(pair.d, closed.ticket_id, fenced=True)
    assert closed.ticket_id == ticket.ticket_id
    assert (await pair.p.sent(m.Unquarantine, "engine")).seq_id == seq_id
    assert pair.p.none_sent(m.Loaded, "engine")
    await pair.released()
    await pair.p.until(lambda: not pair.leftovers())


async def test_an_abort_before_the_holder_is_asked_quarantines_nothing(pair: PullPair) -> None:
    seq_id = await pair.ask()
    await pair.p.sent(t.OpenListener)
    await pair.p.core.abort("r", 0, "the client left")
    assert await pair.p.sent(m.AbortSequence, "engine") == m.AbortSequence(seq_id=seq_id, quarantine=False)
    await pair.p.until(lambda: not pair.leftovers())


async def test_an_abort_before_blocks_are_wanted_forgets_the_offer(pair: PullPair) -> None:
    await pair.ask("other")
    before = len(pair.p.core.role._puller._offers)  # type: ignore[attr-defined]
    await pair.submit("plain")
    await pair.p.core.abort("plain", 0, "the client left")
    assert len(pair.p.core.role._puller._offers) == before  # type: ignore[attr-defined]


async def test_a_holder_that_falls_silent_is_fenced_before_the_blocks_are_free(pair: PullPair) -> None:
    seq_id = await pair.ask()
    await pair.lend()
    await pair.d.server.stop(0)
    await pair.d.core.stop()  # no lease is renewed any more
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    fence = await pair.p.sent(t.Fence)
    assert (fence.worker_id, fence.epoch, fence.forget) == ("decode-0", "de", True)
    assert pair.p.none_sent(m.Unquarantine, "engine")
    pair.p.core.role.on_transfer(t.Fenced(worker_id="decode-0", epoch="de"))
    await pair.p.sent(m.Unquarantine, "engine")


async def test_a_reader_that_falls_silent_makes_the_holder_fence_and_let_go(pair: PullPair) -> None:
    await pair.ask()
    ticket = await pair.lend()
    await pair.p.server.stop(0)
    await pair.p.core.stop()
    closed = await pair.d.sent(t.CloseTicket)
    assert closed.ticket_id == ticket.ticket_id
    assert pair.d.none_sent(m.ReleaseSequence, "engine")
    pair.closed(pair.d, ticket.ticket_id, fenced=True)
    await pair.released()


async def test_a_holder_that_restarted_is_not_asked_twice_and_cannot_vouch_for_its_predecessor(pair: PullPair) -> None:
    seq_id = await pair.ask()
    pair.d.core.registration.epoch = "de2"
    await pair.listen()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    assert pair.d.none_sent(m.PinBlocks, "engine")
    revoked = await pair.p.sent(t.Revoke)
    assert pair.p.none_sent(m.Unquarantine, "engine")
    pair.closed(pair.p, revoked.ticket_id, fenced=True)  # our own transport can tell
    await pair.p.sent(m.Unquarantine, "engine")


@pytest.mark.parametrize(("field", "theirs"), [("dtype", "bfloat16"), ("model", "other weights")])
async def test_unequal_workers_lend_each_other_nothing(field: str, theirs: str) -> None:
    pair = await start(d_fingerprint={field: theirs})
    await pair.ask()
    await pair.listen()
    assert (await pair.loaded()).count == 0
    assert pair.d.none_sent(m.PinBlocks, "engine")
    await pair.stop()


async def test_a_pull_that_arrives_after_its_end_is_refused(pair: PullPair) -> None:
    request = worker_pb2.EndPullRequest(ticket_id="t", holder_epoch="de", reason="gone")
    assert (await pair.d.core.role.end_pull(request)).fenced
    late = worker_pb2.PullRequest(ticket_id="t", holder_epoch="de", transport="tcp", remaining_ms=1000)
    late.fingerprint.CopyFrom(pair.p.core.registration.fingerprint)
    with pytest.raises(Exception, match="over or open already"):
        await pair.d.core.role.pull(late)


async def test_a_list_that_leaves_a_pull_out_neither_ends_nor_frees_it(pair: PullPair) -> None:
    seq_id = await pair.ask()
    await pair.lend()
    for _ in range(3):
        pair.p.core.role.lease(left_out("decode-0", "de", "pe"))
    assert pair.p.none_sent(m.Loaded, "engine")
    await pair.p.core.abort("r", 0, "the client left")
    pair.p.core.role.lease(left_out("decode-0", "de", "pe"))
    assert (await pair.p.sent(m.AbortSequence, "engine")).seq_id == seq_id
    assert pair.p.none_sent(m.Unquarantine, "engine")


async def test_a_lost_transfer_process_of_the_reader_fences_the_pull(pair: PullPair) -> None:
    seq_id = await pair.ask()
    await pair.lend()
    pair.p.core.role.on_transfer_lost()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    await pair.p.sent(m.Unquarantine, "engine")


async def test_a_lost_transfer_process_of_the_holder_lets_go_and_cannot_vouch(pair: PullPair) -> None:
    seq_id = await pair.ask()
    ticket = await pair.lend()
    pair.d.core.role.on_transfer_lost()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0, quarantine=True)
    await pair.d.sent(m.ReleaseSequence, "engine")
    end = await pair.d.core.role.end_pull(worker_pb2.EndPullRequest(ticket_id=ticket.ticket_id, holder_epoch="de"))
    assert not end.fenced


async def test_two_quarantines_of_one_sequence_are_freed_with_the_later_fence(pair: PullPair) -> None:
    """A pull failed, and the same request's hand-off was aborted on the wire."""
    seq_id = await pair.ask()
    ticket = await pair.lend()
    pair.d.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the wire broke"))
    assert (await pair.loaded()).quarantine
    pair.p.core.on_engine(m.PrefillStarted(seq_id=seq_id, block_ids=(40, 41, 42, 43, 44), cached_blocks=1))
    listener = await pair.d.sent(t.OpenListener)
    pair.d.core.role.on_transfer(t.ListenerReady(worker_id=listener.worker_id, epoch=listener.epoch, segment="segment"))
    pair.d.core.on_engine(m.Reserved(seq_id=seq_id, block_ids=(10, 11, 12, 13, 14), cached_blocks=4))
    handed = await pair.p.sent(t.OpenTicket)
    assert handed.skip_blocks == 4
    await pair.p.core.abort("r", 0, "the client left")
    assert (await pair.p.sent(m.AbortSequence, "engine")).quarantine
    pair.closed(pair.p, handed.ticket_id, fenced=True)
    await asyncio.sleep(0.05)
    assert pair.p.none_sent(m.Unquarantine, "engine")
    pair.closed(pair.d, ticket.ticket_id, fenced=True)
    await pair.p.sent(m.Unquarantine, "engine")


async def test_a_peer_that_lapses_as_a_reader_loses_what_it_writes_here_too(pair: PullPair) -> None:
    await pair.ask()
    await pair.lend()
    role = pair.p.core.role
    role._outbox.leases._on_lapse(("decode-0", "de"), "the lease lapsed")  # type: ignore[attr-defined]
    assert (await pair.loaded()).quarantine
    fences = [x for x in pair.p.transfer if isinstance(x, t.Fence)]
    assert [x.forget for x in fences] == [True]


async def test_a_prompt_that_starts_while_no_transfer_process_runs_is_handed_over_when_one_does(
    pair: PullPair,
) -> None:
    """A lost transfer process ends the pull, so the prompt starts at once: nobody hears of its layers."""
    seq_id = await pair.ask()
    await pair.lend()
    pair.p.core.transfer_up.clear()
    pair.p.core.role.on_transfer_lost()
    assert (await pair.loaded()).quarantine
    pair.p.transfer.clear()
    pair.p.core.on_engine(m.PrefillStarted(seq_id=seq_id, block_ids=(40, 41, 42, 43, 44), cached_blocks=1))
    pair.p.core.role.on_transfer_restarted()
    pair.p.core.transfer_up.set()
    await asyncio.sleep(0.02)
    assert pair.d.none_sent(m.ReserveSequence, "engine")
    pair.token(seq_id)
    await pair.d.sent(m.ReserveSequence, "engine")
    source = [x for x in pair.p.transfer if isinstance(x, t.OpenSource)][-1]
    assert (source.block_ids, source.ready_blocks) == ((40, 41, 42, 43, 44), 5)


async def test_a_ticket_that_came_while_no_transfer_process_ran_gets_its_listener_from_the_next(
    pair: PullPair,
) -> None:
    seq_id = await pair.submit()
    pair.d.core.transfer_up.clear()
    pair.d.core.role.on_transfer_lost()
    await pair.start_prefill(seq_id)
    await pair.d.sent(m.ReserveSequence, "engine")
    pair.d.transfer.clear()  # went to nobody
    pair.d.core.role.on_transfer_restarted()
    pair.d.core.transfer_up.set()
    assert (await pair.grant(seq_id)).block_ids == (10, 11, 12)


async def test_nobody_is_let_in_while_its_channel_is_being_fenced(pair: PullPair) -> None:
    role = pair.p.core.role
    role._outbox.leases._on_lapse(("decode-0", "de"), "the lease lapsed")  # type: ignore[attr-defined]
    assert (await pair.p.sent(t.Fence)).forget
    seq_id = await pair.ask()
    assert await pair.loaded() == m.Loaded(seq_id=seq_id, count=0)
    assert pair.p.none_sent(t.OpenListener)
    role.on_transfer(t.Fenced(worker_id="decode-0", epoch="de"))
    await pair.ask("again")
    await pair.p.sent(t.OpenListener)
