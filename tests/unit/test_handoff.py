"""The hand-off between a real writer and a real reader over real gRPC: order, ends, and what must never happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.transfer import messages as t
from services.engine import messages as m
from services.protocol.errors import ErrorCode
from services.protocol.proto import worker_pb2
from tests.unit.handoff_rig import Pair, config, left_out, start_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await start_pair()
    yield pair
    await pair.stop()


async def test_a_hand_off_follows_the_table_on_both_sides_and_frees_the_writer(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    assert ticket.block_ids == (10, 11, 12)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    await pair.verified()
    start = await pair.d.sent(m.StartSequence, "engine")
    assert start.first_tokens == ((0, 7),)
    await pair.p.sent(m.ReleaseSequence, "engine")
    await pair.p.sent(t.CloseSource)
    for half in (pair.p, pair.d):
        arrows = [a for a in half.arrows() if a in ("requested", "granted", "receiving", "verifying", "committed")]
        assert arrows == ["requested", "granted", "receiving", "verifying", "committed"]
    report = pair.p.reports()[0]
    assert (report.state, report.bytes, report.layers) == ("committed", 4096, 2)
    assert len(pair.p.core.requests) == 0
    assert len(pair.d.core.requests) == 1


async def test_the_first_token_goes_to_the_router_before_any_byte_is_committed(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    pair.token(seq_id)
    output = pair.p.outputs()[0]
    assert (list(output.token_ids), output.position, output.cached_tokens) == ([7], 0, 16)
    await pair.grant(seq_id)
    assert pair.d.none_sent(m.StartSequence, "engine")


async def test_decode_does_not_start_before_every_extent_is_verified(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id, (t.Extent(layer=0, block=10, count=3), t.Extent(layer=1, block=10, count=2)))
    await pair.d.until(lambda: "revoked" in pair.d.arrows())
    assert pair.d.none_sent(m.StartSequence, "engine")
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.p.until(pair.p.reports)
    assert pair.p.reports()[0].error.code == ErrorCode.TRANSFER_FAILED
    assert "layer 1 has 2 of 3 blocks" in pair.p.reports()[0].error.message


async def test_a_bad_extent_is_sent_again_once_and_then_committed(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    bad = (t.Extent(layer=1, block=10, count=3, digest=2),)
    await pair.verified(bad)
    assert (await pair.p.sent(t.Resend)).extents == bad
    pair.pushed(ticket.ticket_id, bad)
    await pair.verified(skip=1)
    await pair.d.sent(m.StartSequence, "engine")
    assert pair.p.arrows().count("resending") == 1


async def test_an_extent_that_is_bad_twice_ends_the_attempt_and_nothing_is_decoded(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    bad = (t.Extent(layer=1, block=10, count=3, digest=2),)
    await pair.verified(bad)
    await pair.p.sent(t.Resend)
    pair.pushed(ticket.ticket_id, bad)
    await pair.verified(bad, skip=1)
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.p.until(pair.p.reports)
    assert pair.p.reports()[0].state == "failed"
    assert pair.d.none_sent(m.StartSequence, "engine")


async def test_a_second_commit_that_leaves_out_a_bad_extent_is_refused(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    bad = tuple(t.Extent(layer=i, block=10, count=3, digest=i + 1) for i in range(2))
    await pair.verified(bad)
    await pair.p.sent(t.Resend)
    pair.pushed(ticket.ticket_id, bad[:1])
    await pair.d.until(lambda: "revoked" in pair.d.arrows())
    assert pair.d.none_sent(m.StartSequence, "engine")


async def test_a_commit_of_a_ticket_that_waits_for_blocks_is_refused(pair: Pair) -> None:
    await pair.start_prefill(await pair.submit())
    await pair.d.sent(m.ReserveSequence, "engine")
    ticket_id = next(iter(pair.d.core.role._tickets))  # type: ignore[attr-defined]
    request = worker_pb2.CommitRequest(
        ticket_id=ticket_id, attempt=0, first_tokens=[worker_pb2.FirstToken(choice=0, token_id=7)]
    )
    reply = await pair.d.core.role.commit(request)
    assert (reply.state, reply.reason) == ("revoked", "the ticket has no blocks here")
    assert pair.d.none_sent(m.StartSequence, "engine")


async def test_a_token_that_ends_the_request_closes_the_ticket_and_commits_nothing(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id, finish="stop")
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=True))
    assert closed.ticket_id == ticket.ticket_id
    await pair.d.sent(m.AbortSequence, "engine")
    await pair.p.sent(m.ReleaseSequence, "engine")
    assert pair.d.none_sent(m.StartSequence, "engine")
    assert len(pair.p.core.requests) == len(pair.d.core.requests) == 0


async def test_a_retarget_hands_the_same_kv_to_another_reader_without_computing_again(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.p.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the reader's host is gone"))
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.p.until(pair.p.reports)
    await pair.d.sent(m.AbortSequence, "engine")
    d = pair.d.core.registration
    await pair.p.core.role.retarget(
        worker_pb2.RetargetRequest(
            request_id="r",
            attempt=1,
            reader=worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address),
            remaining_ms=10_000,
        )
    )
    await pair.d.sent(m.ReserveSequence, "engine", skip=1)
    pair.d.core.on_engine(m.Reserved(seq_id="r.1", block_ids=(20, 21, 22), cached_blocks=0))
    again = await pair.p.sent(t.OpenTicket, skip=1)
    assert (again.seq_id, again.block_ids) == (seq_id, (20, 21, 22))
    assert len([x for x in pair.p.engine if isinstance(x, m.AddSequence)]) == 1
    pair.pushed(again.ticket_id, tuple(t.Extent(layer=i, block=20, count=3) for i in range(2)))
    await pair.verified()
    assert (await pair.d.sent(m.StartSequence, "engine")).seq_id == "r.1"


async def test_a_reader_named_while_the_request_queues_is_the_first_one_asked(pair: Pair) -> None:
    seq_id = await pair.submit()
    d = pair.d.core.registration
    for attempt, worker_id in ((1, "d-which-is-lost-too"), (2, d.worker_id)):
        target = worker_pb2.Reader(worker_id=worker_id, epoch=d.epoch, address=d.address)
        await pair.p.core.role.retarget(worker_pb2.RetargetRequest(request_id="r", attempt=attempt, reader=target))
    await pair.start_prefill(seq_id)
    assert (await pair.d.sent(m.ReserveSequence, "engine")).sequence.seq_id == "r.2"
    assert pair.p.reports() == []


async def test_a_reader_named_during_the_reserve_is_asked_although_the_old_one_refuses_for_good(pair: Pair) -> None:
    await pair.d.core.abort("r", 0, "this attempt is over")
    seq_id = await pair.submit()
    d = pair.d.core.registration
    target = worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address)
    await pair.start_prefill(seq_id)
    await pair.p.core.role.retarget(worker_pb2.RetargetRequest(request_id="r", attempt=1, reader=target))
    assert (await pair.d.sent(m.ReserveSequence, "engine")).sequence.seq_id == "r.1"
    assert pair.p.reports() == []


async def test_an_abort_while_bytes_are_on_the_wire_quarantines_both_sides_until_the_fence(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    await pair.d.core.abort("r", 0, "the client left")
    await pair.p.core.abort("r", 0, "the client left")
    for half in (pair.p, pair.d):
        assert (await half.sent(m.AbortSequence, "engine")).quarantine
        assert half.none_sent(m.Unquarantine, "engine")
    await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=True))
    for half in (pair.p, pair.d):
        assert (await half.sent(m.Unquarantine, "engine")).seq_id == seq_id


async def test_an_abort_before_the_first_chunk_quarantines_nothing(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.p.core.abort("r", 0, "the client left")
    assert await pair.p.sent(m.AbortSequence, "engine") == m.AbortSequence(seq_id=seq_id, quarantine=False)


async def test_a_writer_that_falls_silent_is_fenced_before_its_blocks_are_free(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    await pair.p.server.stop(0)
    await pair.p.core.stop()  # no lease is renewed any more
    fence = await pair.d.sent(t.Fence)
    assert (fence.worker_id, fence.epoch, fence.forget) == ("prefill-0", "pe", True)
    assert (await pair.d.sent(m.AbortSequence, "engine")).quarantine
    assert pair.d.none_sent(m.Unquarantine, "engine")
    pair.d.core.role.on_transfer(t.Fenced(worker_id="prefill-0", epoch="pe"))
    await pair.d.sent(m.Unquarantine, "engine")


async def test_a_reader_that_falls_silent_makes_the_writer_report_and_fence(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    await pair.d.server.stop(0)
    await pair.d.core.stop()
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.p.until(pair.p.reports)
    assert pair.p.reports()[0].error.retryable


async def test_a_reader_that_restarted_is_not_written_to(pair: Pair) -> None:
    pair.d.core.registration.epoch = "de"
    seq_id = await pair.submit()
    pair.d.core.registration.epoch = "de2"
    await pair.start_prefill(seq_id)
    await pair.p.until(pair.p.reports)
    assert "restarted" in pair.p.reports()[0].error.message
    assert pair.p.none_sent(t.OpenTicket)


@pytest.mark.parametrize(
    ("field", "theirs"), [("dtype", "bfloat16"), ("block_size", 32), ("model", "other weights"), ("tokenizer", "t2")]
)
async def test_unequal_workers_refuse_each_other_and_name_both_values(field: str, theirs: object) -> None:
    pair = await start_pair(**{field: theirs})
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.p.until(pair.p.reports)
    error = pair.p.reports()[0].error
    ours = getattr(pair.p.core.registration.fingerprint, field)
    assert error.code == ErrorCode.INCOMPATIBLE_WORKERS
    assert field in error.message
    assert repr(ours) in error.message
    assert repr(theirs) in error.message
    assert not error.retryable
    await pair.stop()


async def test_a_reader_without_the_writers_transport_takes_one_of_its_spares(pair: Pair) -> None:
    pair.p.core.registration.transport = "mooncake"
    pair.p.core.registration.spare_transports[:] = ["slow", "tcp"]
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    assert (await pair.d.sent(t.OpenListener)).transport == "tcp"
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    await pair.verified()
    await pair.p.until(pair.p.reports)
    assert pair.p.reports()[0].transport == "tcp"


async def test_workers_with_no_transport_in_common_refuse_each_other_and_name_both_lists(pair: Pair) -> None:
    pair.p.core.registration.transport = "rdma"
    pair.p.core.registration.spare_transports[:] = ["mooncake"]
    await pair.start_prefill(await pair.submit())
    await pair.p.until(pair.p.reports)
    error = pair.p.reports()[0].error
    assert error.code == ErrorCode.INCOMPATIBLE_WORKERS
    assert "'rdma' or 'mooncake' there, 'tcp' here" in error.message


async def test_a_full_reader_makes_the_writer_wait_and_the_budget_ends_the_wait() -> None:
    pair = await start_pair()
    seq_id = await pair.submit(remaining_ms=300)
    await pair.start_prefill(seq_id)
    pair.token(seq_id)
    await pair.d.sent(m.ReserveSequence, "engine")
    await pair.p.until(lambda: [o for o in pair.p.outputs() if o.finish_reason == "error"] or pair.p.reports())
    await pair.d.sent(m.AbortSequence, "engine")
    await pair.d.until(lambda: not len(pair.d.core.requests))
    assert pair.d.none_sent(m.StartSequence, "engine")
    await pair.stop()


async def test_a_close_before_its_reserve_leaves_a_tombstone(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    ticket_id = next(iter(pair.p.core.role._tickets))  # type: ignore[attr-defined]
    await pair.d.core.role.close_ticket(worker_pb2.CloseTicketRequest(ticket_id=ticket_id, fenced=True))
    reply = await pair.d.core.role.commit(worker_pb2.CommitRequest(ticket_id=ticket_id, attempt=0))
    assert reply.state == "revoked"
    late = worker_pb2.ReserveRequest(ticket_id="never-seen", reader_epoch="de", transport="tcp")
    late.fingerprint.CopyFrom(pair.p.core.registration.fingerprint)
    await pair.d.core.role.close_ticket(worker_pb2.CloseTicketRequest(ticket_id="never-seen", fenced=True))
    with pytest.raises(Exception, match="closed or open already"):
        await pair.d.core.role.reserve(late)


async def test_a_commit_without_a_first_token_is_refused_and_nothing_is_decoded(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    extents = [worker_pb2.Extent(layer=i, block=10, count=3) for i in range(2)]
    request = worker_pb2.CommitRequest(ticket_id=ticket.ticket_id, attempt=0, extents=extents)
    reply = await pair.d.core.role.commit(request)
    assert (reply.state, reply.reason) == ("revoked", "the commit brings no first token")
    assert not [x for x in pair.d.engine if isinstance(x, m.StartSequence)]


async def test_a_second_commit_gives_the_first_ones_answer(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    request = worker_pb2.CommitRequest(
        ticket_id=ticket.ticket_id,
        attempt=0,
        first_tokens=[worker_pb2.FirstToken(choice=0, token_id=7)],
        extents=[worker_pb2.Extent(layer=i, block=10, count=3) for i in range(2)],
    )
    first = asyncio.create_task(pair.d.core.role.commit(request))
    second = asyncio.create_task(pair.d.core.role.commit(request))
    await pair.verified()
    assert [(await x).state for x in (first, second)] == ["committed", "committed"]
    assert (await pair.d.core.role.commit(request)).state == "committed"
    assert len([x for x in pair.d.engine if isinstance(x, m.StartSequence)]) == 1


async def test_a_lost_transfer_process_fences_everything_on_both_sides(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    pair.d.core.role.on_transfer_lost()
    await pair.d.sent(m.Unquarantine, "engine")
    pair.p.core.role.on_transfer_lost()
    await pair.p.until(lambda: [o for o in pair.p.outputs() if o.finish_reason == "error"])
    assert pair.p.outputs()[0].error.retryable
    await pair.p.until(lambda: "freed" in pair.p.arrows())


async def test_a_writer_that_cannot_vouch_makes_the_reader_close_its_memory_for_a_moment(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.p.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the wire broke"))
    await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=False))
    await pair.d.sent(t.Revoke)
    pair.d.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=False))
    fence = await pair.d.sent(t.Fence)
    assert not fence.forget
    assert pair.d.none_sent(m.Unquarantine, "engine")
    pair.d.core.role.lease(left_out("prefill-0", "pe", "de"))
    assert pair.d.none_sent(m.Unquarantine, "engine")  # being left out of a list vouches for nothing here
    pair.d.core.role.on_transfer(t.Fenced(worker_id="prefill-0", epoch="pe", segment="segment"))
    assert (await pair.d.sent(m.Unquarantine, "engine")).seq_id == seq_id


async def test_a_list_that_leaves_a_ticket_out_frees_its_blocks_at_once(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    pair.d.core.role.lease(left_out("prefill-0", "pe", "de"))
    aborted = await pair.d.sent(m.AbortSequence, "engine")
    assert (aborted.seq_id, aborted.quarantine) == (seq_id, False)


async def test_a_list_older_than_the_ticket_or_for_another_process_says_nothing(pair: Pair) -> None:
    pair.p.core.role._leases.last_list = 7  # type: ignore[attr-defined]
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    for _ in range(3):
        pair.d.core.role.lease(left_out("prefill-0", "pe", "de", number=7))
        pair.d.core.role.lease(left_out("prefill-0", "pe", "de of before"))
    assert pair.d.none_sent(m.AbortSequence, "engine")
    await pair.d.core.abort("r", 0, "the client left")
    pair.d.core.role.lease(left_out("prefill-0", "pe", "de", number=7))
    pair.d.core.role.lease(left_out("prefill-0", "pe", "de of before"))
    assert (await pair.d.sent(m.AbortSequence, "engine")).quarantine
    assert pair.d.none_sent(m.Unquarantine, "engine")


async def test_a_ticket_is_on_the_lists_while_its_reader_has_no_room(pair: Pair) -> None:
    await pair.start_prefill(await pair.submit())
    await pair.d.sent(m.ReserveSequence, "engine")
    lists = pair.p.core.role._leases  # type: ignore[attr-defined]
    await pair.p.until(lambda: lists.last_list > 2)
    assert pair.d.none_sent(m.AbortSequence, "engine")


async def test_an_abort_while_a_lost_ticket_is_fenced_frees_no_block_before_the_fence(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.p.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the wire broke"))
    await pair.p.sent(t.CloseTicket)
    await pair.p.core.abort("r", 0, "the client left")
    assert (await pair.p.sent(m.AbortSequence, "engine")).quarantine
    assert pair.p.none_sent(m.Unquarantine, "engine")
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=True))
    assert (await pair.p.sent(m.Unquarantine, "engine")).seq_id == seq_id
    await pair.d.until(lambda: "freed" in pair.d.arrows())
    assert not pair.p.core.role._tickets  # type: ignore[attr-defined]


async def test_a_transport_that_can_vouch_spares_the_reader_the_fence(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.p.core.role.on_transfer(t.PushFailed(ticket_id=ticket.ticket_id, message="the wire broke"))
    await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=False))
    await pair.d.sent(t.Revoke)
    pair.d.core.role.on_transfer(t.TicketClosed(ticket_id=ticket.ticket_id, fenced=True))
    await pair.d.sent(m.Unquarantine, "engine")
    assert pair.d.none_sent(t.Fence)


async def test_computed_kv_outlives_the_transfer_process_and_goes_to_a_reader_after_its_restart(pair: Pair) -> None:
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    await pair.grant(seq_id)
    pair.token(seq_id)
    pair.p.core.transfer_up.clear()
    pair.p.core.role.on_transfer_lost()
    await pair.p.until(pair.p.reports)
    pair.p.core.role.on_transfer_restarted()
    pair.p.core.transfer_up.set()
    assert (await pair.p.sent(t.OpenSource, skip=1)).ready_blocks == 3
    d = pair.d.core.registration
    await pair.p.core.role.retarget(
        worker_pb2.RetargetRequest(
            request_id="r",
            attempt=1,
            reader=worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address),
        )
    )
    assert (await pair.d.sent(m.ReserveSequence, "engine", skip=1)).sequence.seq_id == "r.1"


async def test_without_digests_a_covering_commit_is_enough() -> None:
    pair = await start_pair(config(**{"transfer.digests": "false"}))
    seq_id = await pair.submit()
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.token(seq_id)
    pair.pushed(ticket.ticket_id)
    await pair.d.sent(m.StartSequence, "engine")
    assert pair.d.none_sent(t.Verify)
    await pair.stop()
