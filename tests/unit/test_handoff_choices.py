"""A hand-off of several choices: one ticket, a first token for each, and only those that go on are started."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.transfer import messages as t
from services.engine import messages as m
from tests.unit.handoff_rig import Pair, start_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await start_pair()
    yield pair
    await pair.stop()


async def granted(pair: Pair) -> tuple[str, str]:
    """(sequence, ticket) of a request for three choices whose prompt is on its way."""
    seq_id = await pair.submit(n=3)
    await pair.start_prefill(seq_id)
    return seq_id, (await pair.grant(seq_id)).ticket_id


async def committed(pair: Pair, seq_id: str, ticket_id: str) -> m.StartSequence:
    pair.pushed(ticket_id)
    await pair.verified()
    return await pair.d.sent(m.StartSequence, "engine")


async def test_one_ticket_carries_a_first_token_for_each_choice(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    assert (await pair.p.sent(m.AddSequence, "engine")).n == 3
    assert (await pair.d.sent(m.ReserveSequence, "engine")).sequence.n == 3
    pair.first_tokens(seq_id, {0: 7, 1: 8, 2: 9})
    assert [(o.choice, list(o.token_ids)) for o in pair.p.outputs()] == [(0, [7]), (1, [8]), (2, [9])]
    assert pair.p.arrows().count("prefill_done") == 1
    start = await committed(pair, seq_id, ticket_id)
    assert start.first_tokens == ((0, 7), (1, 8), (2, 9))
    assert sum(isinstance(x, t.OpenTicket) for x in pair.p.transfer) == 1
    await pair.p.until(lambda: len(pair.p.core.requests) == 0)


async def test_choices_that_ended_with_token_1_are_not_started(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    pair.first_tokens(seq_id, {0: 2, 1: 8, 2: 2}, ended=(0, 2))
    start = await committed(pair, seq_id, ticket_id)
    assert start.first_tokens == ((1, 8),)
    assert pair.d.core.requests.all()[0].open_choices == {1}


async def test_where_every_choice_ended_the_ticket_is_closed_and_nothing_is_committed(pair: Pair) -> None:
    seq_id, _ = await granted(pair)
    pair.first_tokens(seq_id, {0: 2, 1: 2, 2: 2}, ended=(0, 1, 2))
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.p.sent(m.ReleaseSequence, "engine")
    assert pair.d.none_sent(m.StartSequence, "engine")
    await pair.d.until(lambda: len(pair.d.core.requests) == 0)


async def test_a_choice_dropped_before_the_commit_is_left_out_of_it(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    pair.first_tokens(seq_id, {0: 7, 1: 8, 2: 9})
    for half in (pair.p, pair.d):
        await half.core.drop_choices("r", 0, [1])
    dropped = await pair.d.sent(m.AbortSequence, "engine")
    assert (dropped.seq_id, dropped.choice) == (seq_id, 1)
    assert pair.p.none_sent(m.AbortSequence, "engine")
    start = await committed(pair, seq_id, ticket_id)
    assert start.first_tokens == ((0, 7), (2, 9))


async def test_a_choice_that_the_reader_alone_knows_to_be_dropped_ends_there(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    pair.first_tokens(seq_id, {0: 2, 1: 8, 2: 2}, ended=(0, 2))
    await pair.d.core.drop_choices("r", 0, [1])
    pair.pushed(ticket_id)
    await pair.verified()
    await pair.d.until(lambda: len(pair.d.core.requests) == 0)
    assert pair.d.none_sent(m.StartSequence, "engine")
    aborts = [x for x in pair.d.engine if isinstance(x, m.AbortSequence)]
    assert aborts == [m.AbortSequence(seq_id=seq_id, choice=1), m.AbortSequence(seq_id=seq_id)]


async def test_dropping_every_choice_ends_the_request_on_both_sides(pair: Pair) -> None:
    seq_id, _ = await granted(pair)
    pair.first_tokens(seq_id, {0: 7, 1: 8, 2: 9})
    await pair.p.core.drop_choices("r", 0, [0, 1, 2])
    closed = await pair.p.sent(t.CloseTicket)
    pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
    await pair.d.until(lambda: len(pair.d.core.requests) == 0)
    assert len(pair.p.core.requests) == 0


async def test_the_reader_is_done_when_its_last_choice_ends_and_says_nothing_of_dropped_ones(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    pair.first_tokens(seq_id, {0: 7, 1: 8, 2: 9})
    await committed(pair, seq_id, ticket_id)
    pair.decoded(seq_id, 1, 1, 40, "stop")
    await pair.d.core.drop_choices("r", 0, [0])
    pair.decoded(seq_id, 0, 1, 41)
    assert len(pair.d.core.requests) == 1
    await pair.d.core.drop_choices("r", 1, [2])  # of another attempt
    pair.decoded(seq_id, 2, 1, 42, "length")
    assert len(pair.d.core.requests) == 0
    said = [(o.choice, list(o.token_ids), o.finish_reason) for o in pair.d.outputs()]
    assert said == [(1, [40], "stop"), (2, [42], "length")]
    assert pair.d.arrows().count("finished") == 1


async def test_a_failed_choice_fails_the_request(pair: Pair) -> None:
    seq_id, ticket_id = await granted(pair)
    pair.first_tokens(seq_id, {0: 7, 1: 8, 2: 9})
    await committed(pair, seq_id, ticket_id)
    pair.decoded(seq_id, 0, 1, 40, "stop")
    output = m.SequenceOutput(seq_id=seq_id, position=1, token_ids=(), choice=2, finish_reason="error", error="no")
    pair.d.core.on_engine(m.StepDone(outputs=(output,), stored=(), removed=(), stats=m.Stats()))
    await pair.d.until(lambda: len(pair.d.core.requests) == 0)
    assert pair.d.outputs()[-1].error.message == "no"
    aborted = [x for x in pair.d.engine if isinstance(x, m.AbortSequence)]
    assert aborted == [m.AbortSequence(seq_id=seq_id)]
