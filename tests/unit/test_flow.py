"""The flow against scripted workers over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.config import BudgetConfig, RouterConfig, ServeConfig, WorkerConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.core import RouterCore
from services.router.types import RouterRequest, SamplingSpec, TokenEvent, new_request_id
from tests.fake_worker import CARD, SECRET, Cluster, FakeWorker, accept_only, decode, hand_off, run_normally, token

PROMPT = tuple(range(1, 41))


def make_core(cluster: Cluster, **changes: Any) -> RouterCore:
    config = ServeConfig(secret=SECRET, workers=tuple(cluster.addresses), worker=WorkerConfig(stall_s=3.0))
    return RouterCore(dataclasses.replace(config, **changes), CARD)


def request(max_tokens: int = 4, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> RouterRequest:
    values: dict[str, Any] = {
        "request_id": new_request_id(),
        "prompt_ids": prompt,
        "sampling": SamplingSpec(max_tokens=max_tokens, temperature=0.0),
        "received_s": time.monotonic(),
    }
    return RouterRequest(**(values | fields))


async def until(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        await asyncio.sleep(0.005)


async def collect(core: RouterCore, asked: RouterRequest) -> list[TokenEvent]:
    return [event async for event in core.flow.stream(asked)]


def ids(events: list[TokenEvent]) -> list[int]:
    return [t for event in events for t in event.token_ids]


def expected(count: int) -> list[int]:
    return [token(i) for i in range(count)]


def counted(core: RouterCore, name: str, **labels: str) -> float:
    return core.metrics.registry.get_sample_value(name, labels) or 0.0


async def ended_clean(core: RouterCore) -> None:
    """No request, booking or abort is left."""
    await until(lambda: not core._switchboard.background_tasks)
    assert core.flow.active == 0
    assert len(core._switchboard) == 0
    assert len(core.view.bookings) == 0


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


class Pair:
    """One prefill and one decode worker, and a router attached to both."""

    def __init__(self, core: RouterCore, p: FakeWorker, d: FakeWorker) -> None:
        self.core, self.p, self.d = core, p, d


@pytest.fixture
async def pair(cluster: Cluster) -> AsyncIterator[Pair]:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    yield Pair(core, p, d)
    await core.stop()


async def two_by_two(cluster: Cluster, **changes: Any) -> RouterCore:
    for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        await cluster.add(worker_id, role)
    core = make_core(cluster, **changes)
    await core.start()
    await until(lambda: sum(w["state"] == "ready" for w in core.cluster()["workers"]) == 4)
    return core


async def test_a_pair_serves_a_request_and_each_position_is_given_once(pair: Pair) -> None:
    asked = request(5)
    events = await collect(pair.core, asked)
    assert ids(events) == expected(5)
    assert [e.finish_reason for e in events][-1] == "length"
    assert all(e.finish_reason == "" for e in events[:-1])
    (submit,) = pair.p.submits
    assert submit.reader.worker_id == "d0"
    assert submit.reader.address == pair.d.address
    assert tuple(submit.request.prompt_ids) == PROMPT
    assert len(submit.request.block_names) == 2 * 16
    assert list(submit.request.sampling.stop_token_ids) == [2]
    await ended_clean(pair.core)
    assert pair.p.aborts == pair.d.aborts == []
    assert counted(pair.core, "pdray_requests_total", outcome="ok") == 1


async def test_token_1_goes_out_before_the_hand_off_is_done(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    stream = pair.core.flow.stream(request(3))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0), cached_tokens=32)
    event = await first
    assert (event.token_ids, event.finish_reason, event.cached_tokens) == ((token(0),), "", 32)
    await hand_off(pair.p, pair.d, sent)
    assert ids([e async for e in stream]) == expected(3)[1:]


async def test_a_request_that_token_1_ends_ends_at_the_prefill_worker(pair: Pair) -> None:
    events = await collect(pair.core, request(1))
    assert (ids(events), events[-1].finish_reason) == (expected(1), "length")
    await ended_clean(pair.core)
    assert pair.d.aborts == []


async def test_a_mixed_worker_serves_alone_and_gets_no_reader(cluster: Cluster) -> None:
    m = await cluster.add("m0", "mixed")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    assert ids(await collect(core, request(6))) == expected(6)
    assert not m.submits[0].HasField("reader")
    await core.stop()


@pytest.mark.parametrize("where", ["submit", "output"])
async def test_a_retryable_error_before_the_first_byte_is_tried_elsewhere(cluster: Cluster, where: str) -> None:
    core = await two_by_two(cluster)
    p0, p1 = cluster.workers["p0"], cluster.workers["p1"]

    async def refuse(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        if where == "submit":
            raise RequestError(ErrorCode.OVERLOADED, "full")
        await worker.error(submit.request, ErrorCode.OVERLOADED, True, "full")

    p0.on_submit = refuse
    assert ids(await collect(core, request(3))) == expected(3)
    assert (len(p0.submits), len(p1.submits)) == (1, 1)
    assert p1.submits[0].request.attempt == 2
    await ended_clean(core)
    assert p0.aborts == ([] if where == "submit" else [(p0.submits[0].request.request_id, 1)])
    assert counted(core, "pdray_retries_total", code="overloaded") == 1
    await core.stop()


@pytest.mark.parametrize("code", [ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.NEVER_FITS])
@pytest.mark.parametrize("where", ["submit", "output"])
async def test_a_client_error_of_a_worker_is_final_and_costs_it_nothing(
    cluster: Cluster, code: ErrorCode, where: str
) -> None:
    core = await two_by_two(cluster)

    async def refuse(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        if where == "submit":
            raise RequestError(code, "bad")
        await worker.error(submit.request, code, False, "bad")

    for worker in cluster.workers.values():
        worker.on_submit = refuse
    with pytest.raises(RequestError, match="bad") as caught:
        await collect(core, request())
    assert caught.value.code is code
    assert sum(len(w.submits) for w in cluster.workers.values()) == 1
    assert all(w["state"] == "ready" for w in core.cluster()["workers"])
    await ended_clean(core)
    await core.stop()


async def test_attempts_end_at_the_limit_and_name_the_last_error(cluster: Cluster) -> None:
    for i in range(4):
        worker = await cluster.add(f"m{i}", "mixed")

        async def refuse(_worker: FakeWorker, _submit: worker_pb2.SubmitRequest) -> None:
            raise RequestError(ErrorCode.OVERLOADED, "full")

        worker.on_submit = refuse
    core = make_core(cluster, router=RouterConfig(max_attempts=3))
    await core.start()
    await until(lambda: len(core.view.candidates(())) == 4)
    with pytest.raises(RequestError) as caught:
        await collect(core, request())
    assert caught.value.code is ErrorCode.OVERLOADED
    assert caught.value.retry_after_s
    attempts = sorted(s.request.attempt for w in cluster.workers.values() for s in w.submits)
    assert attempts == [1, 2, 3]
    assert max(len(w.submits) for w in cluster.workers.values()) == 1
    await core.stop()


async def test_a_failed_hand_off_is_retargeted_and_the_kv_is_not_computed_again(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0, d1 = (cluster.workers[w] for w in ("p0", "d0", "d1"))
    p0.on_submit = accept_only
    stream = core.flow.stream(request(4))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    assert p0.submits[0].reader.worker_id == "d0"
    await p0.output(sent, 0, token(0))
    assert (await first).token_ids == (token(0),)
    error = worker_pb2.Error(code="transfer_failed", message="digest", retryable=True)
    await p0.handoff(sent, "failed", error=error)
    assert ids([e async for e in stream]) == expected(4)[1:]
    assert [(r.attempt, r.reader.worker_id) for r in p0.retargets] == [(2, "d1")]
    assert len(p0.submits) == 1
    assert cluster.workers["p1"].submits == []
    await until(lambda: d0.aborts)
    assert d0.aborts == [(sent.request_id, 1)]
    assert d1.aborts == p0.aborts == []
    assert counted(core, "pdray_retargets_total") == 1
    await ended_clean(core)
    await core.stop()


async def test_a_decode_worker_lost_before_the_commit_is_replaced(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    stream = core.flow.stream(request(4))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p0.submits)
    await p0.output(p0.submits[0].request, 0, token(0))
    await first
    await d0.kill()
    assert ids([e async for e in stream]) == expected(4)[1:]
    assert p0.retargets[0].reader.worker_id == "d1"
    await core.stop()


async def test_tokens_of_the_old_attempt_still_count_from_the_prefill_worker_after_a_retarget(
    cluster: Cluster,
) -> None:
    core = await two_by_two(cluster)
    p0, d0, d1 = (cluster.workers[w] for w in ("p0", "d0", "d1"))
    p0.on_submit = p0.on_retarget = accept_only  # type: ignore[assignment]
    events = asyncio.ensure_future(collect(core, request(3)))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    await p0.handoff(sent, "failed", error=worker_pb2.Error(code="worker_lost", retryable=True))
    await until(lambda: p0.retargets)
    await p0.output(sent, 0, token(0))  # attempt 1: sent before the retarget was seen
    await d0.output(sent, 0, 7)  # of the decode worker that was given up
    sent2 = worker_pb2.Request()
    sent2.CopyFrom(sent)
    sent2.attempt = 2
    await decode(d1, sent2)
    assert ids(await events) == expected(3)
    await until(lambda: d0.aborts)
    assert set(d0.aborts) == {(sent.request_id, 1)}
    assert counted(core, "pdray_stale_messages_total") == 1
    await core.stop()


async def test_the_only_reader_gets_a_second_ticket_after_a_failed_transfer(pair: Pair) -> None:
    pair.p.on_submit = pair.p.on_retarget = accept_only  # type: ignore[assignment]
    events = asyncio.ensure_future(collect(pair.core, request(3)))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0))
    await pair.p.handoff(sent, "failed", error=worker_pb2.Error(code="transfer_failed", retryable=True))
    await until(lambda: pair.p.retargets)
    await pair.d.output(sent, 0, 66)  # of the ticket that failed
    await pair.p.output(sent, 0, attempt=2)
    again = worker_pb2.Request()
    again.CopyFrom(sent)
    again.attempt = 2
    await hand_off(pair.p, pair.d, again)
    assert ids(await events) == expected(3)
    assert [(r.attempt, r.reader.worker_id) for r in pair.p.retargets] == [(2, "d0")]


async def test_a_differing_duplicate_fails_the_request_and_is_counted(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    stream = pair.core.flow.stream(request(4))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0))
    await first
    await pair.d.output(sent, 0, 77, 78)
    with pytest.raises(RequestError, match="disagree") as caught:
        await anext(stream)
    assert caught.value.code is ErrorCode.INTERNAL
    assert counted(pair.core, "pdray_duplicates_differing_total") == 1
    await until(lambda: pair.p.aborts and pair.d.aborts)
    await ended_clean(pair.core)


async def test_a_decode_worker_lost_mid_stream_ends_the_stream_with_an_error_after_its_tokens(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    stream = pair.core.flow.stream(request(9))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0))
    await first
    await pair.p.handoff(sent)
    await pair.d.output(sent, 0, token(0), token(1))
    assert (await anext(stream)).token_ids == (token(1),)
    await pair.d.kill()
    with pytest.raises(RequestError) as caught:
        await anext(stream)
    assert caught.value.code is ErrorCode.WORKER_LOST
    await until(lambda: pair.p.aborts)
    await ended_clean(pair.core)
    assert pair.core.ready() == (False, pair.core.ready()[1])


async def test_a_prefill_worker_lost_after_the_commit_changes_nothing(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    events = asyncio.ensure_future(collect(pair.core, request(4)))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0))
    await pair.p.handoff(sent)
    await until(lambda: pair.core.request_debug(sent.request_id)["bytes_moved"])
    await pair.p.kill()
    await until(lambda: {w["worker_id"]: w["state"] for w in pair.core.cluster()["workers"]}["p0"] == "lost")
    await decode(pair.d, sent)
    assert ids(await events) == expected(4)


async def test_a_prefill_worker_lost_before_the_first_byte_is_replaced(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    cluster.workers["p0"].on_submit = accept_only
    events = asyncio.ensure_future(collect(core, request(4)))
    await until(lambda: cluster.workers["p0"].submits)
    await cluster.workers["p0"].kill()
    assert ids(await events) == expected(4)
    assert cluster.workers["p1"].submits[0].request.attempt == 2
    debug = core.request_debug(cluster.workers["p1"].submits[0].request.request_id)
    assert [a["prefill"] for a in debug["attempts"]] == ["p0", "p1"]
    await core.stop()


async def test_a_worker_that_comes_back_as_another_process_is_asked_again_where_nobody_else_is(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    events = asyncio.ensure_future(collect(pair.core, request(4)))
    await until(lambda: pair.p.submits)
    pair.p.on_submit = run_normally
    await pair.p.restart("e2")
    assert ids(await events) == expected(4)
    assert [s.request.attempt for s in pair.p.submits] == [1, 2]
    assert counted(pair.core, "pdray_rungs_total", rung="retry") == 1


async def test_without_a_wait_for_rescue_a_lost_worker_fails_its_requests_at_once(cluster: Cluster) -> None:
    p, _ = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(cluster, router=RouterConfig(rescue_wait_s=0))
    await core.start()
    await until(lambda: core.ready()[0])
    p.on_submit = accept_only
    events = asyncio.ensure_future(collect(core, request(4)))
    await until(lambda: p.submits)
    p.on_submit = run_normally
    await p.restart("e2")
    with pytest.raises(RequestError) as caught:
        await events
    assert caught.value.code is ErrorCode.WORKER_LOST
    assert counted(core, "pdray_rungs_total", rung="fail") == 1
    await until(lambda: core.ready()[0])
    assert ids(await collect(core, request(4))) == expected(4)
    await core.stop()


async def test_a_broken_stream_is_taken_up_where_it_was_and_loses_nothing(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    stream = pair.core.flow.stream(request(6))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    sent = pair.p.submits[0].request
    await pair.p.output(sent, 0, token(0))
    await first
    await pair.d.output(sent, 0, token(0), token(1))
    assert (await anext(stream)).token_ids == (token(1),)
    pair.d.break_streams()
    await until(lambda: not pair.d._streams)
    await decode(pair.d, sent, start=2)
    assert ids([e async for e in stream]) == expected(6)[2:]
    assert [h.router_epoch for h in pair.d.hellos] == [pair.core.identity.epoch] * 2
    assert [h.last_seq for h in pair.d.hellos] == [0, 1]


async def test_messages_that_are_gone_for_good_end_the_attempts_of_that_worker(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    asked = request(4)
    events = asyncio.ensure_future(collect(pair.core, asked))
    await until(lambda: pair.p.submits)
    pair.p.on_submit = run_normally
    await pair.p.say(worker_pb2.WorkerMessage())
    pair.p._seq += 3
    await pair.p.say(worker_pb2.WorkerMessage())
    assert ids(await events) == expected(4)  # nobody else is there, and it lives
    failed = next(e for e in pair.core.request_debug(asked.request_id)["events"] if e["name"] == "failed")
    assert failed["detail"]["code"] == "worker_lost"
    assert "missing" in failed["detail"]["message"]


@pytest.mark.parametrize(
    ("position", "tokens", "says"), [(3, (7,), "where 0 was due"), (0, tuple(range(9)), "more than max_tokens")]
)
async def test_an_answer_with_holes_or_too_many_tokens_is_an_error_never_text(
    pair: Pair, position: int, tokens: tuple[int, ...], says: str
) -> None:
    pair.p.on_submit = accept_only
    events = asyncio.ensure_future(collect(pair.core, request(4)))
    await until(lambda: pair.p.submits)
    await pair.p.output(pair.p.submits[0].request, position, *tokens)
    with pytest.raises(RequestError, match=says) as caught:
        await events
    assert caught.value.code is ErrorCode.INTERNAL


async def test_a_worker_that_makes_no_progress_leaves_the_choice_until_it_moves(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0 = cluster.workers["p0"]
    p0.on_submit = accept_only
    events = asyncio.ensure_future(collect(core, request(4)))
    await until(lambda: p0.submits)
    await p0.set_load(stalled=True, running=1)
    assert ids(await events) == expected(4)
    states = {w["worker_id"]: w["state"] for w in core.cluster()["workers"]}
    assert states == {"d0": "ready", "d1": "ready", "p0": "stalled", "p1": "ready"}
    await p0.set_load(stalled=False, running=0)
    await until(lambda: core.cluster()["workers"][2]["state"] == "ready")
    await core.stop()


@pytest.mark.parametrize("deaf", [True, False])
async def test_a_silent_worker_counts_as_lost(pair: Pair, deaf: bool) -> None:
    pair.p.on_submit = accept_only
    events = asyncio.ensure_future(collect(pair.core, request(4)))
    await until(lambda: pair.p.submits)
    if deaf:
        await until(lambda: pair.core.view.entry("p0").load_s)  # it has spoken: its stream gets the grace
    pair.p.silent, pair.p.deaf = True, deaf
    with pytest.raises(RequestError) as caught:
        await events
    assert caught.value.code is ErrorCode.WORKER_LOST


@pytest.mark.parametrize("how", ["aclose", "cancel"])
async def test_a_client_that_leaves_aborts_both_workers(pair: Pair, how: str) -> None:
    pair.p.on_submit = accept_only
    asked = request(50)
    stream = pair.core.flow.stream(asked)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    if how == "aclose":
        await pair.p.output(pair.p.submits[0].request, 0, token(0))
        await first
        await stream.aclose()
    else:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await until(lambda: pair.p.aborts and pair.d.aborts)
    assert pair.p.aborts == pair.d.aborts == [(asked.request_id, 1)]
    await ended_clean(pair.core)
    assert counted(pair.core, "pdray_requests_total", outcome="cancelled") == 1


async def test_tokens_of_an_unknown_request_are_aborted_once_and_dropped(pair: Pair) -> None:
    ghost = worker_pb2.Request(request_id="ghost", attempt=3)
    for i in range(3):
        await pair.d.output(ghost, i, token(i))
    await until(lambda: counted(pair.core, "pdray_stale_messages_total") == 3)
    await until(lambda: pair.d.aborts)
    assert pair.d.aborts == [("ghost", 3)]


async def test_a_hand_off_that_failed_after_its_request_had_ended_is_aborted(pair: Pair) -> None:
    ghost = worker_pb2.Request(request_id="ghost", attempt=3)
    await pair.p.handoff(ghost)
    await pair.p.handoff(ghost, "failed", error=worker_pb2.Error(code="transfer_failed", retryable=True))
    await until(lambda: pair.p.aborts)
    assert pair.p.aborts == [("ghost", 3)]


async def test_an_abort_reaches_a_worker_that_was_away(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    asked = request(5)
    stream = pair.core.flow.stream(asked)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: pair.p.submits)
    pair.p.deaf = True
    pair.p.break_streams()
    await until(lambda: pair.core.view.entry("p0").state == "connecting")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert pair.p.aborts == []
    pair.p.deaf = False
    await until(lambda: pair.p.aborts)
    assert pair.p.aborts == [(asked.request_id, 1)]


async def test_a_slow_client_does_not_stop_the_drain(pair: Pair) -> None:
    stream = pair.core.flow.stream(request(600))
    await anext(stream)
    await until(lambda: pair.d.acked >= 600)  # all of it has left the worker, nobody took it
    assert ids([e async for e in stream])[-1] == token(599)


@pytest.mark.parametrize(
    ("budget", "budget_s", "names"),
    [
        (BudgetConfig(first_token_s=0.3), None, "first_token_s"),
        (BudgetConfig(total_s=0.3), None, "total_s"),
        (BudgetConfig(), 0.3, "0.3 s"),
    ],
)
async def test_a_spent_budget_ends_the_request_and_frees_its_workers(
    cluster: Cluster, budget: BudgetConfig, budget_s: float | None, names: str
) -> None:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(cluster, budget=budget)
    await core.start()
    await until(lambda: core.ready()[0])
    p.on_submit = accept_only
    with pytest.raises(RequestError, match=names) as caught:
        await collect(core, request(budget_s=budget_s))
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert p.submits[0].request.remaining_ms <= (300 if "first" not in names else 3_600_000)
    await until(lambda: p.aborts and d.aborts)
    await core.stop()


async def test_an_idle_stream_ends_after_its_budget(cluster: Cluster) -> None:
    p = await cluster.add("m0", "mixed")
    core = make_core(cluster, budget=BudgetConfig(idle_s=0.3))
    await core.start()
    await until(lambda: core.ready()[0])
    p.on_submit = accept_only
    stream = core.flow.stream(request())
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p.submits)
    await p.output(p.submits[0].request, 0, token(0))
    await first
    with pytest.raises(RequestError, match="idle_s"):
        await anext(stream)
    await core.stop()


async def test_one_request_over_the_bound_is_refused_at_once_with_a_time_to_come_back(cluster: Cluster) -> None:
    m = await cluster.add("m0", "mixed")
    core = make_core(cluster, router=RouterConfig(max_queue=2))
    await core.start()
    await until(lambda: core.ready()[0])
    m.on_submit = accept_only
    tasks = [asyncio.ensure_future(collect(core, request())) for _ in range(2)]
    await until(lambda: len(m.submits) == 2)
    with pytest.raises(RequestError, match="max_queue") as caught:
        await collect(core, request())
    assert caught.value.code is ErrorCode.OVERLOADED
    assert caught.value.retry_after_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    m.on_submit = run_normally
    assert ids(await collect(core, request(3))) == expected(3)
    await core.stop()


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (request(prompt=()), ErrorCode.INVALID_REQUEST),
        (request(0), ErrorCode.INVALID_REQUEST),
        (request(sampling=SamplingSpec(max_tokens=2, min_tokens=3)), ErrorCode.INVALID_REQUEST),
        (request(4000, prompt=tuple(range(97))), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
async def test_what_can_never_work_reaches_no_worker(pair: Pair, asked: RouterRequest, code: ErrorCode) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(pair.core, asked)
    assert caught.value.code is code
    assert pair.p.submits == []


async def test_without_workers_a_request_is_refused_at_once_and_says_what_is_there(cluster: Cluster) -> None:
    await cluster.add("p0", "prefill")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.view.entry("p0"))
    with pytest.raises(RequestError, match="1 prefill ready") as caught:
        await collect(core, request())
    assert caught.value.code is ErrorCode.NO_WORKERS
    await core.stop()


async def test_a_seed_is_drawn_once_and_carried_through_attempts(cluster: Cluster) -> None:
    core = await two_by_two(cluster)

    async def refuse(_worker: FakeWorker, _submit: worker_pb2.SubmitRequest) -> None:
        raise RequestError(ErrorCode.OVERLOADED, "full")

    cluster.workers["p0"].on_submit = refuse
    await collect(core, request())
    a, b = (cluster.workers[w].submits[0].request.sampling.seed for w in ("p0", "p1"))
    assert a == b
    await collect(core, request())
    assert cluster.workers["p0"].submits[1].request.sampling.seed != a
    await collect(core, request(sampling=SamplingSpec(max_tokens=2, seed=-1)))
    assert cluster.workers["p0"].submits[2].request.sampling.seed == 2**64 - 1
    await core.stop()


async def test_ignore_eos_sends_only_the_clients_own_stop_ids(pair: Pair) -> None:
    await collect(pair.core, request(sampling=SamplingSpec(max_tokens=2, ignore_eos=True, stop_token_ids=(9,))))
    sampling = pair.p.submits[0].request.sampling
    assert sampling.ignore_eos
    assert list(sampling.stop_token_ids) == [9]
