"""A stream whose worker is lost goes on elsewhere, behind the tokens that have come; against scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.config import RouterConfig, ServeConfig, TransferConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.core import RouterCore
from services.router.types import RouterRequest, SamplingSpec, Shaping, TokenEvent
from tests.fake_worker import Cluster, FakeWorker, accept_only, hand_off, run_normally, token
from tests.unit.test_flow import collect, counted, ended_clean, expected, ids, make_core, request, two_by_two, until

TOKENS = 40  # three full blocks and more, with the prompt of 40


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.stop()


class Stream:
    """A request that is being read."""

    def __init__(self, core: RouterCore, asked: RouterRequest) -> None:
        self.asked = asked
        self.events: list[TokenEvent] = []
        self.task = asyncio.ensure_future(self._read(core))

    async def _read(self, core: RouterCore) -> None:
        async for event in core.flow.stream(self.asked):
            self.events.append(event)

    async def has(self, count: int) -> None:
        await until(lambda: len(ids(self.events)) >= count or self.task.done())

    def kinds(self, core: RouterCore) -> list[str]:
        return [a["kind"] for a in core.request_debug(self.asked.request_id)["attempts"]]

    def rungs(self, core: RouterCore) -> list[str]:
        events = core.request_debug(self.asked.request_id)["events"]
        return [e["detail"]["rung"] for e in events if e["name"] == "rung"]


async def decoding(cluster: Cluster, core: RouterCore, count: int = 5, **fields: Any) -> Stream:
    """A stream that p0 has handed to d0, which has given ``count`` tokens and is silent now."""
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    stream = Stream(core, request(TOKENS, **fields))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    await p0.output(sent, 0, token(0), cached_tokens=16)
    await p0.handoff(sent)
    await d0.output(sent, 0, *(token(i) for i in range(count)))
    await stream.has(count)
    p0.on_submit = run_normally
    return stream


def resumed(cluster: Cluster) -> list[worker_pb2.SubmitRequest]:
    return [s for w in cluster.workers.values() for s in w.submits if s.request.attempt > 1]


async def test_a_decode_worker_lost_mid_stream_is_replaced_and_no_token_is_lost_or_doubled(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    stream = await decoding(cluster, core)
    await cluster.workers["d0"].kill()
    await stream.task
    assert ids(stream.events) == expected(TOKENS)
    assert stream.events[-1].finish_reason == "length"
    (submit,) = resumed(cluster)
    first = cluster.workers["p0"].submits[0].request
    assert submit.reader.worker_id == "d1"
    assert list(submit.request.output_ids) == expected(5)
    assert submit.request.attempt == 2
    for name in ("prompt_ids", "block_names", "root_digest", "n"):
        assert getattr(submit.request, name) == getattr(first, name)
    assert submit.request.sampling == first.sampling
    assert stream.kinds(core) == ["submit", "migrate"]
    assert stream.rungs(core) == ["migrate"]
    assert counted(core, "pdray_rungs_total", rung="migrate") == 1
    assert {e.cached_tokens for e in stream.events} == {16}
    await ended_clean(core)
    await core.stop()


async def test_tokens_that_came_and_were_not_given_yet_are_not_computed_again(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    stream = core.flow.stream(request(TOKENS))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    await p0.output(sent, 0, token(0))
    events = [await first]
    await p0.handoff(sent)
    p0.on_submit = run_normally
    await d0.output(sent, 0, *(token(i) for i in range(20)))
    await until(lambda: d0.acked)  # nobody takes them
    await d0.kill()
    await until(lambda: core._switchboard._live[sent.request_id].failure)
    events += [event async for event in stream]
    assert ids(events) == expected(TOKENS)
    assert list(resumed(cluster)[0].request.output_ids) == expected(20)
    await core.stop()


async def test_a_token_that_nobody_has_taken_is_kept_too(cluster: Cluster) -> None:
    """The prefill worker is lost right after token 1, before the commit."""
    core = await two_by_two(cluster)
    p0 = cluster.workers["p0"]
    p0.on_submit = accept_only
    stream = core.flow.stream(request(TOKENS))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p0.submits)
    exchange = core._switchboard._live[p0.submits[0].request.request_id]
    await p0.output(p0.submits[0].request, 0, token(0))
    await until(lambda: exchange.outputs)
    await p0.kill()
    events = [await first, *[event async for event in stream]]
    assert ids(events) == expected(TOKENS)
    assert list(resumed(cluster)[0].request.output_ids) == [token(0)]
    await core.stop()


async def test_a_worker_that_stalls_is_left_and_what_it_says_later_is_ignored(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    stream = await decoding(cluster, core)
    d0, sent = cluster.workers["d0"], cluster.workers["p0"].submits[0].request
    await d0.set_load(stalled=True, running=1)
    await until(lambda: resumed(cluster))
    await d0.output(sent, 5, 7, 7, 7)
    await stream.task
    assert ids(stream.events) == expected(TOKENS)
    await until(lambda: (sent.request_id, 1) in d0.aborts)
    assert counted(core, "pdray_duplicates_differing_total") == 0
    await core.stop()


async def test_a_stream_moves_as_often_as_there_are_attempts(cluster: Cluster) -> None:
    for i in range(4):
        await cluster.add(f"m{i}", "mixed")
    core = make_core(cluster, router=RouterConfig(max_attempts=3))
    await core.start()
    await until(lambda: len(core.view.candidates(())) == 4)

    async def two_more(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        at = len(submit.request.output_ids)
        await worker.output(submit.request, at, token(at), token(at + 1))
        await worker.error(submit.request, ErrorCode.WORKER_LOST, True, "the engine died")

    for worker in cluster.workers.values():
        worker.on_submit = two_more
    stream = Stream(core, request(TOKENS))
    with pytest.raises(RequestError, match="the engine died"):
        await stream.task
    assert ids(stream.events) == expected(6)
    assert sorted(s.request.attempt for w in cluster.workers.values() for s in w.submits) == [1, 2, 3]
    assert max(len(w.submits) for w in cluster.workers.values()) == 1
    assert stream.rungs(core) == ["migrate", "migrate", "fail"]
    await ended_clean(core)
    await core.stop()


@pytest.mark.parametrize("code", [ErrorCode.INVALID_REQUEST, ErrorCode.INTERNAL, ErrorCode.STALE])
async def test_what_is_not_retryable_moves_nothing(cluster: Cluster, code: ErrorCode) -> None:
    core = await two_by_two(cluster)
    stream = await decoding(cluster, core)
    await cluster.workers["d0"].error(cluster.workers["p0"].submits[0].request, code, False, "bad")
    with pytest.raises(RequestError, match="bad"):
        await stream.task
    assert resumed(cluster) == []
    assert stream.rungs(core) == ([] if code is not ErrorCode.INTERNAL else ["fail"])
    await core.stop()


async def test_an_end_that_has_come_is_the_end(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    stream = core.flow.stream(request(TOKENS))
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    await p0.output(sent, 0, token(0))
    await p0.handoff(sent)
    events = [await first]
    await d0.output(sent, 0, token(0), token(1), finish="stop")
    await until(lambda: d0.acked)
    await d0.kill()
    await until(lambda: core.view.entry("d0").state == "lost")
    events += [event async for event in stream]
    assert (ids(events), events[-1].finish_reason) == (expected(2), "stop")
    assert resumed(cluster) == []
    await core.stop()


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_with_one_pair_a_stream_that_nobody_can_take_over_ends_with_its_error(
    cluster: Cluster, victim: str
) -> None:
    p0, d0 = await cluster.add("p0", "prefill"), await cluster.add("d0", "decode")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    p0.on_submit = accept_only
    stream = Stream(core, request(TOKENS))
    await until(lambda: p0.submits)
    await p0.output(p0.submits[0].request, 0, token(0))
    await stream.has(1)
    if victim == "d0":
        await p0.handoff(p0.submits[0].request)
        await d0.output(p0.submits[0].request, 0, token(0), token(1))
        await stream.has(2)
    await cluster.workers[victim].kill()
    with pytest.raises(RequestError) as caught:
        await stream.task
    assert caught.value.code is ErrorCode.WORKER_LOST
    assert len(p0.submits) == 1
    assert stream.rungs(core) == ["fail"]
    await ended_clean(core)
    await core.stop()


async def test_a_successor_of_the_only_decode_worker_takes_the_stream_over(cluster: Cluster) -> None:
    await cluster.add("p0", "prefill")
    d0 = await cluster.add("d0", "decode")
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    stream = await decoding(cluster, core)
    await d0.restart("e2")
    await stream.task
    assert ids(stream.events) == expected(TOKENS)
    assert resumed(cluster)[0].reader.epoch == "e2"
    await core.stop()


async def test_a_prefill_worker_that_is_done_is_no_culprit(cluster: Cluster) -> None:
    """The decode worker is lost after the commit, of which the router has not heard: the retarget is refused."""
    await cluster.add("p0", "prefill")
    for worker_id in ("d0", "d1"):
        await cluster.add(worker_id, "decode")
    core = make_core(cluster)
    await core.start()
    await until(lambda: len(core.view.candidates(())) == 3)
    p0 = cluster.workers["p0"]
    p0.on_submit = accept_only

    async def refuse(_worker: FakeWorker, _request: worker_pb2.RetargetRequest) -> None:
        raise RequestError(ErrorCode.STALE, "no KV here")

    p0.on_retarget = refuse
    stream = Stream(core, request(TOKENS))
    await until(lambda: p0.submits)
    await p0.output(p0.submits[0].request, 0, token(0))
    await stream.has(1)
    p0.on_submit = run_normally
    await cluster.workers["d0"].kill()
    await stream.task
    assert ids(stream.events) == expected(TOKENS)
    assert stream.kinds(core) == ["submit", "retarget", "migrate"]
    assert p0.submits[1].reader.worker_id == "d1"
    await core.stop()


async def test_logprobs_of_the_prompt_are_not_asked_for_again(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0 = cluster.workers["p0"]
    p0.on_submit = accept_only
    shaping = Shaping(prompt_logprobs=0, logprobs=0)
    asked = request(TOKENS, prompt=(5, 6, 7), sampling=SamplingSpec(max_tokens=TOKENS, shaping=shaping))
    stream = Stream(core, asked)
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    assert sent.sampling.HasField("prompt_logprobs")
    told = [worker_pb2.TokenLogprobs(logprob=-1, rank=1)] * 2
    await p0.output(sent, 0, prompt_start=1, prompt_logprobs=told)
    await p0.output(sent, 0, token(0), logprobs=told[:1])
    await stream.has(1)
    p0.on_submit = accept_only
    await p0.kill()
    await until(lambda: cluster.workers["p1"].submits)
    again = cluster.workers["p1"].submits[0].request
    assert not again.sampling.HasField("prompt_logprobs")
    assert again.sampling.HasField("logprobs")
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)
    await core.stop()


# --- several choices ---


async def test_choices_that_go_on_are_named_with_what_came_of_each(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    stream = Stream(core, request(6, n=4))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    for choice in range(4):
        await p0.output(sent, 0, 100 * choice, choice=choice)
    await p0.handoff(sent)
    await d0.output(sent, 0, 0, 1, finish="stop", choice=0)
    await d0.output(sent, 0, 100, 101, 102, choice=1)
    await stream.has(7)
    core.flow.end_choice(stream.asked.request_id, 3)

    async def go_on(worker: FakeWorker, submit: worker_pb2.SubmitRequest) -> None:
        reader = worker.reader(submit)
        for given in submit.request.outputs:
            await worker.output(submit.request, 0, given.token_ids[0], choice=given.choice)
        await worker.handoff(submit.request)
        for given in submit.request.outputs:
            at = len(given.token_ids)
            rest = range(100 * given.choice + at, 100 * given.choice + 6)
            await reader.output(submit.request, at, *rest, choice=given.choice, finish="length")

    for worker_id in ("p0", "p1"):
        cluster.workers[worker_id].on_submit = go_on
    await d0.kill()
    await stream.task
    (submit,) = resumed(cluster)
    given = {o.choice: list(o.token_ids) for o in submit.request.outputs}
    assert given == {1: [100, 101, 102], 2: [200]}
    assert not submit.request.output_ids
    by_choice = {c: [t for e in stream.events if e.choice == c for t in e.token_ids] for c in range(4)}
    assert by_choice == {0: [0, 1], 1: [*range(100, 106)], 2: [*range(200, 206)], 3: [300]}
    await ended_clean(core)
    await core.stop()


# --- failed transfers ---


async def fail_transfer(worker: FakeWorker, request_: worker_pb2.Request, attempt: int | None = None) -> None:
    error = worker_pb2.Error(code="transfer_failed", message="a wrong digest", retryable=True)
    await worker.handoff(request_, "failed", error=error, attempt=attempt or request_.attempt)


def always_failing(cluster: Cluster) -> None:
    """No KV ever arrives; who computes alone is well."""

    async def submit(worker: FakeWorker, sent: worker_pb2.SubmitRequest) -> None:
        if not sent.HasField("reader"):
            await run_normally(worker, sent)
            return
        at = len(sent.request.output_ids)
        await worker.output(sent.request, at, token(at))
        await fail_transfer(worker, sent.request)

    async def retarget(worker: FakeWorker, sent: worker_pb2.RetargetRequest) -> None:
        await fail_transfer(worker, worker.submits[-1].request, sent.attempt)

    for worker in cluster.workers.values():
        worker.on_submit, worker.on_retarget = submit, retarget


async def test_where_no_kv_arrives_a_decode_worker_computes_alone_at_last(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    always_failing(cluster)
    stream = Stream(core, request(6))
    await stream.task
    assert ids(stream.events) == expected(6)
    assert stream.kinds(core) == ["submit", "retarget", "migrate", "compute_here"]
    assert stream.rungs(core) == ["retarget", "migrate", "compute_here"]
    computed = next(s for s in resumed(cluster) if s.compute_here)
    assert list(computed.request.output_ids) == expected(2)
    assert len(cluster.workers["p0"].submits) == len(cluster.workers["p1"].submits) == 1
    for rung in ("retarget", "migrate", "compute_here"):
        assert counted(core, "pdray_rungs_total", rung=rung) == 1
    await ended_clean(core)
    await core.stop()


async def test_one_pair_has_every_rung_too(cluster: Cluster) -> None:
    for worker_id, role in (("p0", "prefill"), ("d0", "decode")):
        await cluster.add(worker_id, role)
    core = make_core(cluster)
    await core.start()
    await until(lambda: core.ready()[0])
    always_failing(cluster)
    stream = Stream(core, request(6))
    await stream.task
    assert ids(stream.events) == expected(6)
    assert stream.kinds(core) == ["submit", "retarget", "migrate", "compute_here"]
    await core.stop()


async def test_a_mixed_worker_computes_before_a_decode_worker_has_to(cluster: Cluster) -> None:
    for worker_id, role in (("p0", "prefill"), ("d0", "decode"), ("m0", "mixed")):
        await cluster.add(worker_id, role)
    core = make_core(cluster, router=RouterConfig(max_attempts=2), transfer=TransferConfig(on_kv_failure="recompute"))
    await core.start()
    await until(lambda: len(core.view.candidates(())) == 3)
    await cluster.workers["m0"].set_load(waiting_prefill_tokens=20_000)  # the pair is cheaper
    await until(lambda: core.view.entry("m0").load.waiting_prefill_tokens)
    always_failing(cluster)
    stream = Stream(core, request(6))
    await stream.task
    assert [a["prefill"] for a in core.request_debug(stream.asked.request_id)["attempts"]] == ["p0", "m0"]
    assert stream.kinds(core) == ["submit", "compute_here"]
    assert not cluster.workers["m0"].submits[0].HasField("reader")
    await core.stop()


@pytest.mark.parametrize(
    ("policy", "kinds"), [("recompute", ["submit", "migrate", "migrate", "compute_here"]), ("fail", ["submit"])]
)
async def test_the_policy_for_failed_transfers_is_explicit(cluster: Cluster, policy: str, kinds: list[str]) -> None:
    core = await two_by_two(cluster, transfer=TransferConfig(on_kv_failure=policy))
    always_failing(cluster)
    stream = Stream(core, request(6))
    if policy == "fail":
        with pytest.raises(RequestError, match="a wrong digest") as caught:
            await stream.task
        assert caught.value.code is ErrorCode.TRANSFER_FAILED
        assert stream.rungs(core) == ["fail"]
    else:
        await stream.task
        assert ids(stream.events) == expected(6)
    assert stream.kinds(core) == kinds
    assert all(not w.retargets for w in cluster.workers.values())
    await core.stop()


async def test_a_resend_is_counted_once(cluster: Cluster) -> None:
    core = await two_by_two(cluster)
    p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
    p0.on_submit = accept_only
    events = asyncio.ensure_future(collect(core, request(3)))
    await until(lambda: p0.submits)
    sent = p0.submits[0].request
    for worker in (p0, d0):
        event = worker_pb2.TimelineEvent(request_id=sent.request_id, attempt=1, name="resending")
        await worker.say(worker_pb2.WorkerMessage(events=[event]))
    await p0.output(sent, 0, token(0))
    await hand_off(p0, d0, sent)
    assert ids(await events) == expected(3)
    assert counted(core, "pdray_rungs_total", rung="resend") == 1
    await core.stop()


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transfer\.on_kv_failure must be one of"):
        TransferConfig(on_kv_failure="hope")
    assert ServeConfig().transfer.on_kv_failure == "ladder"


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"rescue_wait_s": -1.0}])
def test_attempts_and_waits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"router\.{next(iter(wrong))} must"):
        RouterConfig(**wrong)
