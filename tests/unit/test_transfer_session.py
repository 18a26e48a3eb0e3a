"""The writer's session against a simulated wire: what is sent, when, and how every ticket ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.transfer import messages as m
from kvstore.transfer.base import WriteState
from kvstore.transfer.progress import Chunk, StepBegins, StepEnds
from tests.unit.transfer_wire import BLOCK_BYTES, LAYERS, PEER, POOL, Wire


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_each_layer_goes_out_when_it_is_computed_and_not_before(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(10, 14))
    wire.connect()
    wire.begin(0, 4)
    assert wire.sent() == []
    wire.layer(0)
    assert wire.sent() == [(0, b) for b in range(4)]
    wire.layer(1)
    wire.layer(2)
    wire.end()
    assert wire.sent() == [(layer, b) for layer in range(LAYERS) for b in range(4)]


def test_without_layerwise_layers_go_out_at_the_end_of_the_step() -> None:
    wire = Wire(layerwise=False)
    wire.source(range(4))
    wire.grant(range(10, 14))
    wire.connect()
    wire.begin(0, 4)
    for layer in range(LAYERS):
        wire.layer(layer)
    assert wire.sent() == []
    wire.end()
    assert sorted(wire.sent()) == sorted((layer, b) for layer in range(LAYERS) for b in range(4))


def test_a_lost_layer_message_is_made_up_for_by_the_end_of_the_step(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(10, 14))
    wire.connect()
    wire.begin(0, 4)
    wire.layer(0)
    wire.layer(0)  # doubled
    wire.end()
    wire.finish()
    assert sorted(wire.sent()) == sorted((layer, b) for layer in range(LAYERS) for b in range(4))
    assert len(wire.of(m.Pushed)) == 1


def test_pushed_waits_for_the_last_write_and_the_last_digest(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(10, 14))
    wire.connect()
    wire.compute(0, 4)
    wire.complete(count=2)
    wire.hash_all()
    assert not wire.of(m.Pushed)
    wire.complete()
    (pushed,) = wire.of(m.Pushed)
    assert [(e.layer, e.block, e.count) for e in pushed.extents] == [(layer, 10, 4) for layer in range(LAYERS)]
    assert all(e.digest >= 1000 for e in pushed.extents)
    assert pushed.num_bytes == 4 * LAYERS * BLOCK_BYTES


def test_digests_that_come_last_complete_the_push(wire: Wire) -> None:
    wire.source(range(2))
    wire.grant(range(2))
    wire.connect()
    wire.compute(0, 2)
    wire.complete()
    assert not wire.of(m.Pushed)
    wire.hash_all()
    assert len(wire.of(m.Pushed)) == 1


def test_a_late_grant_sends_merged_runs_of_all_chunks(wire: Wire) -> None:
    wire.source(range(8), ready_blocks=2)
    wire.compute(2, 3)
    wire.compute(5, 3)
    wire.grant(range(20, 28))
    wire.connect()
    assert [(i.run.layer, i.run.source_block, i.run.count) for i in wire.submitted] == [
        (n, 0, 8) for n in range(LAYERS)
    ]


def test_skipped_blocks_are_never_sent(wire: Wire) -> None:
    wire.source(range(8), ready_blocks=4)
    wire.grant(range(20, 28), skip_blocks=3)
    wire.connect()
    wire.compute(4, 4)
    wire.finish()
    assert sorted(wire.sent()) == sorted((layer, b) for layer in range(LAYERS) for b in range(3, 8))
    assert len(wire.of(m.Pushed)) == 1


def test_a_reader_that_has_everything_is_pushed_at_once(wire: Wire) -> None:
    wire.source(range(3), ready_blocks=3)
    wire.grant(range(3), skip_blocks=3)
    (pushed,) = wire.of(m.Pushed)
    assert pushed.extents == ()


def test_progress_that_overtakes_its_source_is_not_lost(wire: Wire) -> None:
    wire.begin(0, 4)
    wire.layer(0)
    wire.source(range(4))
    wire.layer(1)
    wire.end()
    wire.grant(range(4))
    wire.connect()
    wire.finish()
    assert len(wire.of(m.Pushed)) == 1


def test_no_more_than_the_limit_is_on_the_wire() -> None:
    wire = Wire(max_outstanding=4)
    wire.source(range(0, 20, 2))  # no two are neighbours
    wire.grant(range(10))
    wire.connect()
    wire.compute(0, 10)
    wire.finish()
    assert wire.most_on_wire == 4
    assert len(wire.of(m.Pushed)) == 1


def test_a_throttled_run_goes_out_when_it_would_have_arrived() -> None:
    wire = Wire(throttle_bytes_per_s=4 * BLOCK_BYTES)  # a layer of four blocks takes a second
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    assert wire.submitted == []
    assert wire.session.next_wakeup_s() == wire.now_s + 1
    wire.now_s += 1
    wire.act()
    assert len(wire.submitted) == 1
    wire.now_s += 1.5
    wire.act()
    assert len(wire.submitted) == 2
    assert wire.session.next_wakeup_s() == wire.now_s + 0.5
    wire.now_s += 0.5
    wire.act()
    wire.finish()
    traces = wire.of(m.Pushed)[0].layers
    assert [t.submitted_s - 100 for t in traces] == [0, 1, 2]


def test_one_failed_write_fences_and_sends_again_what_was_not_done(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.hash_all()
    wire.complete(count=1)
    wire.complete(WriteState.FAILED, count=1)
    assert wire.links == ["open", "close"]
    assert not wire.of(m.PushFailed)
    wire.closed()
    assert wire.links == ["open", "close", "open"]
    wire.connect()
    assert [i.run.layer for i in wire.submitted] == [0, 1, 2, 1, 2]
    wire.complete()
    assert len(wire.of(m.Pushed)) == 1


def test_a_second_failure_fails_the_ticket(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    for _ in range(2):
        wire.complete(WriteState.FAILED)
        wire.closed()
        wire.connect()
    (failed,) = wire.of(m.PushFailed)
    assert "failed twice" in failed.message
    wire.close_ticket()
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="t", fenced=True)]


def test_a_reader_that_cannot_be_reached_fails_its_tickets_at_once(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.session.on_connect_failed(PEER, "refused")
    wire.act()
    assert wire.of(m.PushFailed) == [m.PushFailed(ticket_id="t", message="refused", kind="connect")]
    wire.grant(range(4), ticket_id="u")  # another attempt connects again
    assert wire.links == ["open", "open"]


def test_closing_an_idle_ticket_is_answered_at_once(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.close_ticket()
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="t", fenced=True)]
    wire.connect()
    wire.compute(0, 4)
    assert wire.submitted == []


def test_what_waits_for_the_link_is_not_sent_once_its_ticket_is_closed(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.compute(0, 4)
    wire.close_ticket()
    wire.connect()
    assert wire.submitted == []


def test_what_is_computed_after_a_ticket_was_closed_is_not_sent(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 2)
    wire.close_ticket()
    wire.compute(2, 2)
    assert {b for _, b in wire.sent()} == {0, 1}


def test_writes_that_break_because_of_a_fence_do_not_count_as_failures(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.hash_all()
    wire.fence()
    wire.complete(WriteState.FAILED)
    wire.closed()
    wire.connect()
    wire.complete(WriteState.FAILED, count=1)  # the first failure of its own
    wire.closed()
    wire.connect()
    wire.complete()
    assert not wire.of(m.PushFailed)
    assert len(wire.of(m.Pushed)) == 1


def test_a_resend_connects_again_where_the_link_is_gone(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.finish()
    wire.fence()
    wire.closed()
    assert wire.links == ["open", "close", "fenced"]
    wire.session.resend(m.Resend(ticket_id="t", extents=wire.of(m.Pushed)[0].extents[:1]), wire.now_s)
    wire.act()
    wire.connect()
    wire.finish()
    assert len(wire.of(m.Pushed)) == 2


def test_closing_a_ticket_nobody_knows_is_answered(wire: Wire) -> None:
    wire.close_ticket("never seen")
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="never seen", fenced=True)]


def test_closing_waits_for_writes_on_the_wire(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.close_ticket()
    assert not wire.of(m.TicketClosed)
    wire.complete()
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="t", fenced=True)]
    assert wire.links == ["open"]  # no fence was needed


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_closing_fences_what_does_not_end_in_time(is_confirmed: bool) -> None:
    wire = Wire(fence_after_s=2.0)
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.close_ticket()
    assert wire.session.next_wakeup_s() == wire.now_s + 2
    wire.now_s += 2
    wire.act()
    assert wire.links == ["open", "close"]
    assert not wire.of(m.TicketClosed)
    wire.closed(is_confirmed)
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="t", fenced=is_confirmed)]


def test_a_fence_sends_the_live_tickets_of_the_same_peer_again(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4), ticket_id="dies")
    wire.grant(range(10, 14), ticket_id="lives")
    wire.connect()
    wire.compute(0, 4)
    wire.close_ticket("dies")
    wire.now_s += 2
    wire.act()
    wire.closed()
    before = len(wire.submitted)
    wire.connect()
    wire.finish()
    assert {i.ticket.ticket_id for i in wire.submitted[before:]} == {"lives"}
    assert [x.ticket_id for x in wire.of(m.Pushed)] == ["lives"]
    assert [x.ticket_id for x in wire.of(m.TicketClosed)] == ["dies"]


def test_a_fence_that_was_asked_for_is_answered_after_the_close(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.fence()
    assert wire.links == ["open", "close"]
    wire.closed()
    assert wire.links == ["open", "close", "fenced", "open"]


def test_forgetting_a_peer_closes_its_tickets_and_opens_no_link(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.fence(forget=True)
    wire.closed()
    assert wire.links == ["open", "close", "fenced"]
    assert [x.ticket_id for x in wire.of(m.TicketClosed)] == ["t"]


def test_fencing_a_stranger_is_answered_at_once(wire: Wire) -> None:
    wire.fence()
    assert wire.links == ["fenced"]


def test_another_segment_replaces_the_channel(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4), ticket_id="old", segment="x")
    wire.connect()
    wire.grant(range(10, 14), ticket_id="new", segment="y")
    assert wire.links == ["open", "close"]
    wire.closed()
    wire.connect()
    wire.compute(0, 4)
    wire.finish()
    assert {x.ticket_id for x in wire.of(m.Pushed)} == {"old", "new"}


def test_resent_extents_are_hashed_anew_and_reported_alone(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.finish()
    bad = wire.of(m.Pushed)[0].extents[1:2]
    wire.session.resend(m.Resend(ticket_id="t", extents=bad), wire.now_s)
    wire.act()
    wire.finish()
    again = wire.of(m.Pushed)[1]
    assert [(e.layer, e.block) for e in again.extents] == [(1, 0)]
    assert [i.run.layer for i in wire.submitted] == [0, 1, 2, 1]


def test_extents_that_are_not_of_the_ticket_fail_it(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    wire.compute(0, 4)
    wire.finish()
    wire.session.resend(m.Resend(ticket_id="t", extents=(m.Extent(layer=1, block=30, count=4),)), wire.now_s)
    wire.act()
    assert "not of this ticket" in wire.of(m.PushFailed)[0].message


def test_closing_a_source_closes_its_tickets(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.session.close_source(m.CloseSource(seq_id="s"), wire.now_s)
    wire.act()
    assert wire.of(m.TicketClosed) == [m.TicketClosed(ticket_id="t", fenced=True)]
    wire.grant(range(4), ticket_id="late")
    assert "no source" in wire.of(m.PushFailed)[0].message


def test_one_step_may_compute_chunks_of_several_prompts(wire: Wire) -> None:
    wire.source(range(4))
    wire.grant(range(4))
    wire.connect()
    chunks = (Chunk("s", 0, 2, False), Chunk("other", 0, 7, True), Chunk("s", 2, 2, True))
    wire.session.on_progress(StepBegins(1, chunks), wire.now_s)
    wire.session.on_progress(StepEnds(1, wire.now_s), wire.now_s)
    wire.act()
    wire.finish()
    assert len(wire.of(m.Pushed)) == 1


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What may happen to one prompt of 12 blocks, in any order the engine and the wire could bring."""
    kinds = ["layer", "complete", "fail", "hash", "closed", "connect", "connect-fails", "grant", "fence", "time"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 5)), max_size=60))


@settings(max_examples=200)
@given(
    story=stories(),
    cuts=st.sets(st.integers(1, 11), max_size=3),
    skip=st.integers(0, 12),
    order=st.permutations(range(POOL)),
    close_at=st.integers(0, 80),
)
def test_any_story_sends_only_what_is_computed_and_ends_every_ticket_once(
    story: list[tuple[str, int]], cuts: set[int], skip: int, order: list[int], close_at: int
) -> None:
    wire = Wire(max_outstanding=3)
    source_ids, target_ids = tuple(order[:12]), tuple(order[20:32])
    wire.source(source_ids)
    bounds = [0, *sorted(cuts), 12]
    layers = [(a, b - a, layer) for a, b in itertools.pairwise(bounds) for layer in range(LAYERS)]
    computed: set[tuple[int, int]] = set()
    landed: set[tuple[int, int]] = set()
    is_granted = is_closed = False

    def compute_next() -> None:
        first, count, layer = layers.pop(0)
        if layer == 0:
            wire.begin(first, count)
        computed.update((layer, source_ids[i]) for i in range(first, first + count))
        wire.layer(layer)
        if layer == LAYERS - 1:
            wire.end()

    def finish_some(state: WriteState, count: int) -> None:
        ended = list(wire.on_wire.values())[:count]
        if state is WriteState.DONE:
            landed.update((i.run.layer, i.run.target_block + n) for i in ended for n in range(i.run.count))
        wire.complete(state, count)

    def check() -> None:
        assert set(wire.sent()) <= computed
        assert wire.most_on_wire <= 3
        assert len(wire.of(m.TicketClosed)) <= 1

    for at, (kind, number) in enumerate(story):
        link_is_closing = bool(wire.links) and wire.links[-1] == "close"
        if at == close_at and is_granted:
            wire.close_ticket()
            is_closed = True
        match kind:
            case "layer" if layers:
                compute_next()
            case "grant" if not is_granted:
                wire.grant(target_ids, skip_blocks=skip)
                is_granted = True
            case "complete":
                finish_some(WriteState.DONE, number)
            case "fail":
                finish_some(WriteState.FAILED, min(number, 1))
            case "hash":
                wire.hash_all()
            case "closed" if link_is_closing:
                wire.closed()
            case "connect":
                wire.connect()
            case "connect-fails":
                wire.session.on_connect_failed(PEER, "refused")
                wire.act()
            case "fence":
                wire.fence()
            case "time":
                wire.now_s += number
                wire.act()
        check()
    while layers:
        compute_next()
    if not is_granted:
        wire.grant(target_ids, skip_blocks=skip)
    for _ in range(6):  # let everything end well from here on
        if wire.links and wire.links[-1] == "close":
            wire.closed()
        wire.connect()
        while wire.on_wire or wire.hashes:
            finish_some(WriteState.DONE, 100)
            wire.hash_all()
        check()
    needed = {(layer, b) for layer in range(LAYERS) for b in target_ids[skip:]}
    if wire.of(m.Pushed):
        assert landed >= needed
    ends = len(wire.of(m.Pushed)) + len(wire.of(m.PushFailed))
    assert ends == 1 or (is_closed and ends == 0)
    if not is_closed:
        wire.close_ticket()
    assert len(wire.of(m.TicketClosed)) == 1
    sent = len(wire.submitted)
    wire.session.close_source(m.CloseSource(seq_id="s"), wire.now_s)
    wire.now_s += 100
    wire.act()
    assert len(wire.submitted) == sent
