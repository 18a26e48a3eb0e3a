"""Attempts that bring outputs along, and decode workers that compute alone, on real writers and readers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstore.transfer import messages as t
from services.engine import messages as m
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from tests.unit.handoff_rig import ROUTER, Pair, config, start_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await start_pair()
    yield pair
    await pair.stop()


def asked(**fields: Any) -> worker_pb2.Request:
    return worker_pb2.Request(
        request_id="r",
        attempt=2,
        router_id=ROUTER[0],
        router_epoch=ROUTER[1],
        prompt_ids=range(1, 41),
        remaining_ms=20_000,
        root_digest=b"root",
        sampling=worker_pb2.Sampling(max_tokens=30),
        **fields,
    )


async def submit(pair: Pair, **fields: Any) -> str:
    d = pair.d.core.registration
    reader = worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address)
    await pair.p.core.submit(worker_pb2.SubmitRequest(request=asked(**fields), reader=reader))
    return "r.2"


async def test_both_engines_get_the_outputs_and_the_reader_goes_on_behind_them(pair: Pair) -> None:
    seq_id = await submit(pair, output_ids=[101, 102, 103])
    added = await pair.p.sent(m.AddSequence, "engine")
    assert (added.output_ids, added.outputs, added.n) == ((101, 102, 103), (), 1)
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    reserved = await pair.d.sent(m.ReserveSequence, "engine")
    assert reserved.sequence.output_ids == (101, 102, 103)
    output = m.SequenceOutput(seq_id=seq_id, position=3, token_ids=(104,))
    pair.p.core.on_engine(m.StepDone(outputs=(output,), stored=(), removed=(), stats=m.Stats()))
    assert [(o.position, list(o.token_ids)) for o in pair.p.outputs()] == [(3, [104])]
    pair.pushed(ticket.ticket_id)
    await pair.verified()
    start = await pair.d.sent(m.StartSequence, "engine")
    assert start.first_tokens == ((0, 104),)
    pair.decoded(seq_id, 0, 3, 104)
    pair.decoded(seq_id, 0, 4, 105, finish="stop")
    assert [(o.position, o.finish_reason) for o in pair.d.outputs()] == [(3, ""), (4, "stop")]
    assert len(pair.d.core.requests) == 0


async def test_only_choices_that_go_on_are_waited_for_and_committed(pair: Pair) -> None:
    outputs = [worker_pb2.ChoiceOutputs(choice=c, token_ids=ids) for c, ids in ((1, [11, 12]), (3, [31]))]
    seq_id = await submit(pair, n=4, outputs=outputs)
    added = await pair.p.sent(m.AddSequence, "engine")
    assert (added.n, added.outputs) == (4, ((1, (11, 12)), (3, (31,))))
    await pair.start_prefill(seq_id)
    ticket = await pair.grant(seq_id)
    pair.first_tokens(seq_id, {1: 11, 3: 31})
    pair.pushed(ticket.ticket_id)
    await pair.verified()
    start = await pair.d.sent(m.StartSequence, "engine")
    assert start.first_tokens == ((1, 11), (3, 31))
    live = pair.d.core.requests.get(seq_id)
    assert live is not None
    assert live.open_choices == {1, 3}
    pair.decoded(seq_id, 1, 2, 13, finish="length")
    pair.decoded(seq_id, 3, 1, 32, finish="length")
    assert len(pair.d.core.requests) == 0


async def test_a_decode_worker_computes_only_where_it_is_told_that_all_else_failed(pair: Pair) -> None:
    with pytest.raises(RequestError, match="does not take prompts") as caught:
        await pair.d.core.submit(worker_pb2.SubmitRequest(request=asked()))
    assert caught.value.code is ErrorCode.INTERNAL
    assert pair.d.none_sent(m.AddSequence, "engine")
    again = asked(output_ids=[5])
    again.attempt = 3
    await pair.d.core.submit(worker_pb2.SubmitRequest(request=again, compute_here=True))
    added = await pair.d.sent(m.AddSequence, "engine")
    assert (added.hand_off, added.output_ids) == (False, (5,))
    pair.decoded("r.3", 0, 1, 6, finish="stop")
    (output,) = pair.d.outputs()
    assert (output.position, list(output.token_ids), output.finish_reason) == (1, [6], "stop")


async def test_outputs_count_towards_what_a_worker_can_hold(pair: Pair) -> None:
    limit = pair.p.core.registration.max_model_len
    with pytest.raises(RequestError, match=f"there are {limit} tokens before the next one") as caught:
        await submit(pair, output_ids=range(1, limit - 40 + 1))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_without_the_ladder_bad_extents_are_not_sent_again(policy: str) -> None:
    pair = await start_pair(config(**{"transfer.on_kv_failure": policy}))
    try:
        seq_id = await submit(pair)
        await pair.start_prefill(seq_id)
        ticket = await pair.grant(seq_id)
        pair.token(seq_id)
        pair.pushed(ticket.ticket_id)
        await pair.verified((t.Extent(layer=1, block=10, count=3, digest=2),))
        closed = await pair.p.sent(t.CloseTicket)
        pair.p.core.role.on_transfer(t.TicketClosed(ticket_id=closed.ticket_id, fenced=True))
        await pair.p.until(pair.p.reports)
        assert pair.p.reports()[0].error.code == ErrorCode.TRANSFER_FAILED
        assert pair.p.none_sent(t.Resend)
    finally:
        await pair.stop()
