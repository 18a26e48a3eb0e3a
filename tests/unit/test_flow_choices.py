"""Several choices of one request in the router's flow, against scripted workers over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.types import TokenEvent
from tests.fake_worker import Cluster, FakeWorker, accept_only
from tests.unit.test_flow import Pair, collect, ended_clean, make_core, request, two_by_two, until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


@pytest.fixture
async def pair(cluster: Cluster) -> AsyncIterator[Pair]:
    p, d = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    yield Pair(core, p, d)
    await core.stop()


def token(choice: int, position: int) -> int:
    return 1000 * (choice + 1) + position


async def first_tokens(worker: FakeWorker, asked: worker_pb2.Request) -> None:
    for choice in range(asked.n):
        await worker.output(asked, 0, token(choice, 0), choice=choice)


async def decode(worker: FakeWorker, asked: worker_pb2.Request, lengths: dict[int, int]) -> None:
    """From token 1 on, the choices in turns, each to its own length."""
    for position in range(max(lengths.values())):
        for choice, length in lengths.items():
            if position < length:
                finish = "stop" if position == length - 1 else ""
                await worker.output(asked, position, token(choice, position), choice=choice, finish=finish)


async def serve(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
    """Token 1 here, the rest there; choice i has 3 + i tokens."""
    asked = submit.request
    await first_tokens(worker, asked)
    await worker.handoff(asked)
    worker.spawn(decode(worker.reader(submit), asked, {i: 3 + i for i in range(asked.n)}))


def by_choice(events: list[TokenEvent]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        found.setdefault(event.choice, []).extend(event.token_ids)
    return found


def whole(n: int) -> dict[int, list[int]]:
    return {i: [token(i, k) for k in range(3 + i)] for i in range(n)}


async def test_every_choice_comes_once_and_ends_by_itself(pair: Pair) -> None:
    pair.p.on_submit = serve
    asked = request(8, n=3)
    events = await collect(pair.core, asked)
    assert by_choice(events) == whole(3)
    assert sorted(e.choice for e in events if e.finish_reason) == [0, 1, 2]
    assert pair.p.submits[0].request.n == 3
    await ended_clean(pair.core)
    assert pair.p.aborts == pair.d.aborts == []
    timeline = pair.core.timelines.find(asked.request_id)
    assert timeline is not None
    assert (timeline.output_tokens, timeline.longest_choice_tokens) == (3 + 4 + 5, 5)


async def test_choices_count_as_sequences_and_blocks_of_their_worker(pair: Pair) -> None:
    pair.p.on_submit = accept_only
    stream = pair.core.flow.stream(request(8, n=4))
    waiting = asyncio.ensure_future(anext(stream))
    await until(lambda: len(pair.p.submits) == 1)
    bookings = pair.core.view.bookings
    assert bookings.active_sequences("d0", 0) == 4
    assert bookings.free_blocks("d0", 100) in (100, 100 - (3 + 4))  # a load that came since covers them
    waiting.cancel()
    await until(lambda: not len(bookings))
    assert bookings.active_sequences("d0", 0) == 0


async def test_a_choice_that_is_not_wanted_is_told_to_both_workers_and_ignored(pair: Pair) -> None:
    async def slowly(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await first_tokens(worker, submit.request)

    pair.p.on_submit = slowly
    asked = request(8, n=3)
    stream = pair.core.flow.stream(asked)
    first = [await anext(stream) for _ in range(3)]
    assert by_choice(first) == {i: [token(i, 0)] for i in range(3)}
    pair.core.flow.end_choice(asked.request_id, 1)
    await until(lambda: pair.p.drops and pair.d.drops)
    assert pair.p.drops == pair.d.drops == [(asked.request_id, 1, [1])]
    sent = pair.p.submits[0].request
    await pair.p.handoff(sent)
    await decode(pair.d, sent, {0: 3, 1: 4, 2: 5})
    rest = [event async for event in stream]
    assert by_choice([*first, *rest]) == {0: whole(3)[0], 1: [token(1, 0)], 2: whole(3)[2]}
    await ended_clean(pair.core)
    assert pair.p.aborts == pair.d.aborts == []


async def test_a_choice_of_an_unknown_request_is_ignored(pair: Pair) -> None:
    pair.core.flow.end_choice("nobody", 0)
    assert pair.p.drops == []


async def test_leaving_aborts_all_choices_at_once(pair: Pair) -> None:
    async def slowly(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await first_tokens(worker, submit.request)

    pair.p.on_submit = slowly
    asked = request(8, n=3)
    stream = pair.core.flow.stream(asked)
    await anext(stream)
    await stream.aclose()
    await until(lambda: pair.p.aborts and pair.d.aborts)
    assert pair.p.aborts == pair.d.aborts == [(asked.request_id, 1)]
    await ended_clean(pair.core)


async def test_two_workers_that_disagree_on_one_choice_fail_the_request(pair: Pair) -> None:
    async def differing(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await first_tokens(worker, submit.request)
        await worker.handoff(submit.request)
        await worker.reader(submit).output(submit.request, 0, 5, choice=2)

    pair.p.on_submit = differing
    with pytest.raises(RequestError, match=r"two workers disagree on token 0: (3000 and 5|5 and 3000)"):
        await collect(pair.core, request(8, n=3))
    await ended_clean(pair.core)


@pytest.mark.parametrize(("choice", "position", "match"), [(3, 0, "choice 3 of 3"), (1, 2, "came where 1 was due")])
async def test_what_cannot_be_fails_the_request(pair: Pair, choice: int, position: int, match: str) -> None:
    async def wrong(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await first_tokens(worker, submit.request)
        await worker.output(submit.request, position, 9, choice=choice)

    pair.p.on_submit = wrong
    with pytest.raises(RequestError, match=match) as caught:
        await collect(pair.core, request(8, n=3))
    assert caught.value.code is ErrorCode.INTERNAL


async def test_a_failure_before_anything_was_given_starts_all_choices_again(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    broken: list[str] = []

    async def fails_once(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        if not broken:
            broken.append(worker.worker_id)
            await worker.error(submit.request, ErrorCode.INTERNAL, True)
            return
        await serve(worker, submit)

    for name in ("p0", "p1"):
        cluster.workers[name].on_submit = fails_once
    assert by_choice(await collect(core, request(8, n=3))) == whole(3)
    await ended_clean(core)
    await core.stop()


async def test_a_lost_reader_is_replaced_and_what_was_given_stays(cluster: Cluster) -> None:
    core = await two_by_two(cluster)

    async def loses_the_reader(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        await first_tokens(worker, submit.request)
        error = worker_pb2.Error(code=str(ErrorCode.TRANSFER_FAILED), message="gone", retryable=True)
        await worker.handoff(submit.request, "failed", error=error)

    async def goes_on(worker: FakeWorker, retarget: worker_pb2.RetargetRequest) -> None:
        asked = worker_pb2.Request()
        asked.CopyFrom(worker.submits[0].request)
        asked.attempt = retarget.attempt
        await worker.handoff(asked)
        worker.spawn(decode(cluster.workers[retarget.reader.worker_id], asked, {i: 3 + i for i in range(3)}))

    for name in ("p0", "p1"):
        cluster.workers[name].on_submit = loses_the_reader
        cluster.workers[name].on_retarget = goes_on
    assert by_choice(await collect(core, request(8, n=3))) == whole(3)
    await ended_clean(core)
    await core.stop()
