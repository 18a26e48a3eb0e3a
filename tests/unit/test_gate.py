"""The gate between fronts and workers, over the real view and policy: who waits, who goes, who is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import pytest

from services.config import RouterConfig, ServeConfig
from services.engine_config import EngineConfig
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.admission import gate, rooms
from services.router.admission.gate import Gate
from services.router.admission.slo import SLO
from services.router.fabric import FabricMeter
from services.router.member import WorkerState
from services.router.plan import Plan, ask, name_prompt, plan
from services.router.timeline import Timeline, Timelines
from services.router.types import RouterRequest, SamplingSpec, new_request_id
from services.router.view import View
from services.slo_config import AdmissionConfig
from services.telemetry.metrics import RouterMetrics
from tests.fake_worker import fingerprint

PROMPT_TOKENS = 100
HELD_TOKENS = 200  # what a prefill worker holds: two steps of a hundred
LATE = RequestError(ErrorCode.DEADLINE_EXCEEDED, "too late")


class Rig:
    """A gate; the test speaks for the workers by loads."""

    def __init__(self, **admission: Any) -> None:
        self.config = ServeConfig(
            engine=EngineConfig(max_num_batched_tokens=100, max_num_seqs=4),
            admission=AdmissionConfig(**admission),
            router=RouterConfig(rescue_wait_s=0.05),
        )
        self.metrics = RouterMetrics()
        self.view = View("model-a", "tokenizer-a", 60.0, time.monotonic)
        self.gate = Gate(self.config, self.view, self.metrics, time.monotonic)
        self.fabric = FabricMeter(time.monotonic)
        self.timelines = Timelines(64)
        self.sent: list[RouterRequest] = []  # in the order in which they went through
        self.plans: dict[str, Plan] = {}

    def join(self, worker_id: str, role: str) -> None:
        self.view.registered(
            worker_pb2.Registration(
                worker_id=worker_id, role=role, epoch="e1", fingerprint=fingerprint(), num_blocks=4000, transport="tcp"
            ),
            f"{worker_id}:1",
        )
        self.view.link_is(worker_id, WorkerState.READY)

    def load(self, worker_id: str, **fields: Any) -> None:
        values = {"blocks_total": 4000, "blocks_free": 4000, "prefill_tokens_per_s": 1000.0, "step_ms": 10.0} | fields
        self.view.loaded(worker_id, worker_pb2.Load(**values))

    def pair(self) -> Rig:
        self.join("p0", "prefill")
        self.join("d0", "decode")
        self.load("p0")
        self.load("d0")
        return self

    def request(self, tokens: int = PROMPT_TOKENS, **fields: Any) -> RouterRequest:
        start = 1000 * len(self.timelines)
        values: dict[str, Any] = {
            "request_id": new_request_id(),
            "prompt_ids": tuple(range(start, start + tokens)),
            "sampling": SamplingSpec(max_tokens=8),
            "received_s": time.monotonic(),
        }
        return RouterRequest(**(values | fields))

    def timeline(self, request: RouterRequest) -> Timeline:
        return self.timelines.open(request.request_id, "", request.received_s)

    async def enter(self, request: RouterRequest, limit_s: float = 60.0) -> Plan | None:
        def choose(avoid: Collection[str]) -> Plan | None:
            kind = self.view.kind()
            if kind is None:
                return None
            wanted = ask(self.config.router.policy, 0)
            return plan(name_prompt(request, kind), self.view, self.fabric, wanted, avoid)

        limit = time.monotonic() + limit_s, LATE
        found = await self.gate.enter(request, choose, limit, self.timeline(request))
        if found is not None:  # as the attempt does
            self.view.bookings.book(request.request_id, found.booking)
            self.gate.sent(request, found.booking)
            self.gate.accepted(request.request_id)
            self.plans[request.request_id] = found
        self.sent.append(request)
        return found

    async def start(self, *requests: RouterRequest) -> list[asyncio.Task[Plan | None]]:
        """Begin to enter, one after the other."""
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(self.enter(request)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return tasks

    def computed(self, request: RouterRequest) -> None:
        self.view.bookings.prefill_done(request.request_id)
        self.gate.computed(request.request_id)

    def end(self, request: RouterRequest, tokens: int = 8) -> None:
        self.view.bookings.release(request.request_id)
        self.gate.left(request, tokens, is_finished=True)

    def refusals(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("pdray_admission_refusals_total", {"reason": reason}) or 0.0

    async def finish(self, tasks: list[asyncio.Task[Plan | None]], within_s: float = 5.0) -> None:
        """Everybody is served, in whatever order the gate has."""
        end_s = time.monotonic() + within_s
        done = 0
        while not all(t.done() for t in tasks) or done < len(self.sent):
            assert time.monotonic() < end_s, f"{len(self.gate)} still wait"
            await asyncio.sleep(0.002)
            while done < len(self.sent):
                self.computed(self.sent[done])
                self.end(self.sent[done])
                done += 1
        self.is_clean()

    def is_clean(self) -> None:
        assert len(self.gate) == 0
        assert len(self.view.bookings) == 0
        assert len(self.gate._held) == 0


async def test_without_load_nothing_waits() -> None:
    rig = Rig().pair()
    entered = rig.enter(rig.request())
    with pytest.raises(StopIteration):  # it never had to wait for anything
        entered.send(None)
    rig.end(rig.sent[0])
    rig.is_clean()


async def test_a_worker_gets_two_steps_of_work_and_the_rest_waits_in_order() -> None:
    rig = Rig(order="fcfs").pair()
    asked = [rig.request() for _ in range(6)]
    tasks = await rig.start(*asked)
    assert rig.sent == asked[:2]
    assert len(rig.gate) == 4
    assert rig.metrics.registry.get_sample_value("pdray_waiting_requests") == 4
    assert rig.metrics.registry.get_sample_value("pdray_waiting_tokens") == 400
    rig.computed(asked[0])
    await asyncio.sleep(0)
    assert rig.sent == asked[:3]
    await rig.finish(tasks)
    assert rig.sent == asked


async def test_a_load_that_says_less_work_is_left_lets_the_next_one_go() -> None:
    rig = Rig().pair()
    asked = [rig.request(tokens=1000), rig.request()]
    tasks = await rig.start(*asked)
    assert rig.sent == asked[:1]
    await asyncio.sleep(0.02)
    rig.load("p0", waiting_prefill_tokens=900, prefill_tokens_per_s=1.0)
    await asyncio.sleep(0.03)
    assert rig.sent == asked[:1]
    rig.load("p0", waiting_prefill_tokens=150, prefill_tokens_per_s=1.0)
    await asyncio.wait_for(tasks[1], 5)
    await rig.finish(tasks)


async def test_where_nothing_is_held_back_everything_goes_at_once() -> None:
    rig = Rig(held_steps=0.0).pair()
    asked = [rig.request() for _ in range(20)]
    tasks = await rig.start(*asked)
    assert rig.sent == asked
    await rig.finish(tasks)


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", "2345"), ("priority", "3524"), ("edf", "4253"), ("fair", "5234")]
)
async def test_each_order_sends_in_its_own_way(order: str, expected: str) -> None:
    rig = Rig(order=order).pair()
    fields: list[dict[str, Any]] = [
        {"tenant": "x"},
        {"tenant": "x"},
        {"tenant": "x", "priority": 1, "slo": SLO(ttft_ms=20_000)},
        {"tenant": "x", "priority": 0},
        {"tenant": "x", "priority": 2, "slo": SLO(ttft_ms=10_000)},
        {"tenant": "y", "priority": 0, "slo": SLO(ttft_ms=30_000)},
    ]
    asked = [rig.request(**f) for f in fields]
    tasks = await rig.start(*asked)
    assert rig.sent == asked[:2]
    await rig.finish(tasks)
    assert "".join(str(asked.index(r)) for r in rig.sent[2:]) == expected


async def test_who_waits_for_a_busy_worker_does_not_hold_up_who_has_a_free_one() -> None:
    rig = Rig(order="fcfs").pair()
    rig.join("p1", "prefill")
    for n in range(4):
        rig.load("p1", prompt_tokens_computed=1000 * n)  # its speed is known
    rig.load("p0", prefill_tokens_per_s=100_000.0)  # the policy prefers it, however much waits there
    asked = [rig.request() for _ in range(4)]
    tasks = await rig.start(*asked)
    assert {rig.plans[r.request_id].prefill_id for r in rig.sent} == {"p0"}
    assert rig.sent == asked[:2]
    rig.load("p0", prefill_tokens_per_s=1.0, waiting_prefill_tokens=1000)  # it turns out slow
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert {rig.plans[r.request_id].prefill_id for r in asked[2:]} == {"p1"}
    await rig.finish(tasks)


async def test_a_waiting_request_goes_elsewhere_when_its_worker_is_lost() -> None:
    rig = Rig().pair()
    asked = [rig.request() for _ in range(3)]
    tasks = await rig.start(*asked)
    assert rig.sent == asked[:2]
    rig.join("p1", "prefill")
    rig.load("p1")
    rig.view.link_is("p0", WorkerState.LOST)
    await asyncio.wait_for(tasks[2], 5)
    assert rig.plans[asked[2].request_id].prefill_id == "p1"
    await rig.finish(tasks)


async def test_without_any_pair_left_those_that_wait_are_told_soon() -> None:
    rig = Rig().pair()
    asked = [rig.request() for _ in range(3)]
    tasks = await rig.start(*asked)
    rig.view.link_is("d0", WorkerState.LOST)
    with pytest.raises(RequestError) as raised:
        await asyncio.wait_for(tasks[2], 5)
    assert raised.value.code is ErrorCode.NO_WORKERS
    for request in asked[:2]:
        rig.end(request)
    rig.is_clean()


async def test_waiting_ends_with_the_budget_and_leaves_nothing() -> None:
    rig = Rig().pair()
    asked = [rig.request() for _ in range(2)]
    await rig.start(*asked)
    with pytest.raises(RequestError, match="too late"):
        await rig.enter(rig.request(), limit_s=0.02)
    for request in asked:
        rig.end(request)
    rig.is_clean()


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    rig = Rig(order="fair").pair()
    tasks = await rig.start(*[rig.request() for _ in range(5)])
    for task in tasks[3:]:
        task.cancel()
    await asyncio.gather(*tasks[3:], return_exceptions=True)
    assert len(rig.gate) == 1
    await rig.finish(tasks[:3])


# --- bounds ---


async def test_past_its_bound_the_queue_refuses_with_its_numbers() -> None:
    rig = Rig(max_waiting=2).pair()
    tasks = await rig.start(*[rig.request() for _ in range(4)])
    with pytest.raises(RequestError, match=r"admission\.max_waiting") as raised:
        await rig.enter(rig.request())
    assert raised.value.code is ErrorCode.OVERLOADED
    assert raised.value.retry_after_s
    assert rig.refusals("bound") == 1
    await rig.finish(tasks)


async def test_a_better_priority_takes_the_place_of_a_worse_one() -> None:
    rig = Rig(max_waiting=2).pair()
    tasks = await rig.start(*[rig.request(priority=p) for p in (0, 0, 1, 5)])
    (late,) = await rig.start(rig.request(priority=0))
    with pytest.raises(RequestError, match="took this one's place") as raised:
        await tasks[3]
    assert raised.value.status.http == 503
    assert rig.refusals("shed") == 1
    await rig.finish([*tasks[:3], late])


async def test_waiting_prompt_tokens_are_bounded_too() -> None:
    rig = Rig(max_waiting_tokens=250).pair()
    tasks = await rig.start(*[rig.request() for _ in range(4)])
    with pytest.raises(RequestError, match="max_waiting_tokens"):
        await rig.enter(rig.request())
    await rig.finish(tasks)


# --- targets ---


async def test_a_target_of_the_first_token_counts_what_waits_before_and_not_what_waits_behind() -> None:
    """1,000 tokens a second: a hundred tokens are 100 ms."""
    rig = Rig(order="priority", margin=1.0).pair()
    tasks = await rig.start(*[rig.request() for _ in range(6)])
    with pytest.raises(RequestError, match="600 queue") as raised:
        await rig.enter(rig.request(slo=SLO(ttft_ms=650)))
    assert raised.value.retry_after_s
    assert rig.refusals("ttft") == 1
    (urgent,) = await rig.start(rig.request(slo=SLO(ttft_ms=650), priority=-1))
    assert not urgent.done(), "it waits, since 300 ms are before it and not 600"
    assert rig.refusals("ttft") == 1
    await rig.finish([*tasks, urgent])


async def test_a_refusal_is_told_with_what_was_predicted() -> None:
    rig = Rig().pair()
    request = rig.request(tokens=1000, slo=SLO(ttft_ms=500))
    with pytest.raises(RequestError):
        await rig.enter(request)
    shown = rig.timeline(request).to_dict()
    assert shown["promise"]["compute_ms"] == 1000
    assert shown["promise"]["ttft_ms"] >= 1000
    assert rig.sent == []
    rig.is_clean()


async def test_a_worker_that_is_slower_than_it_says_is_believed_no_more() -> None:
    rig = Rig().pair()
    for _ in range(5):
        request = rig.request(tokens=16)
        found = await rig.enter(request)
        assert found is not None
        rig.gate.sent(request, found.booking, found.decision.choice.terms)
        await asyncio.sleep(0.05)
        rig.computed(request)
        rig.end(request)
    idle, asked = (rig.request(slo=SLO(ttft_ms=300)) for _ in range(2))  # 100 ms as the worker says
    assert await rig.enter(idle) is not None, "it has nothing else to do, and only that can tell"
    with pytest.raises(RequestError, match="computing"):
        await rig.enter(asked)
    promise = rig.timeline(asked).promise
    assert promise is not None
    assert promise.correction > 2
    assert not promise.is_idle
    rig.end(idle)
    rig.is_clean()


async def test_an_idle_pair_is_tried_now_and_then_where_it_may_have_become_fast_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "TRY_S", 0.05)
    rig = Rig().pair()

    async def asks(ttft_ms: float) -> bool:
        request = rig.request(slo=SLO(ttft_ms=ttft_ms))  # 100 ms are predicted
        try:
            await rig.enter(request)
        except RequestError:
            return False
        rig.end(request)
        return True

    assert not await asks(60), "the worker has just said how fast it is"
    await asyncio.sleep(0.06)
    assert not await asks(20), "nobody becomes five times as fast"
    assert await asks(60)
    assert not await asks(60), "one was let in"
    await asyncio.sleep(0.06)
    busy = rig.request()
    await rig.enter(busy)
    assert not await asks(60), "it is not idle"
    rig.end(busy)
    rig.is_clean()


async def test_a_worker_that_has_never_computed_is_tried_first() -> None:
    rig = Rig().pair()
    rig.load("p0", prefill_tokens_per_s=0.0)
    asked = rig.request(tokens=5000, slo=SLO(ttft_ms=50))  # 5 s by the rate that is assumed of it
    assert await rig.enter(asked) is not None
    with pytest.raises(RequestError):
        await rig.enter(rig.request(tokens=5000, slo=SLO(ttft_ms=50)))
    rig.end(asked)
    rig.is_clean()


async def test_running_streams_keep_their_time_per_token_and_the_next_one_waits() -> None:
    rig = Rig(margin=1.0).pair()
    for running in (1, 2, 1, 2, 1, 2):  # 10 ms and 10 more for each sequence
        rig.load("d0", running=running, step_ms=10.0 + 10 * running)
        rig.gate._rooms.learn()
    rig.load("d0", running=0, step_ms=20.0)
    first = rig.request(slo=SLO(tpot_ms=35))
    second = rig.request(slo=SLO(tpot_ms=35))
    third = rig.request()  # without a target of its own
    tasks = await rig.start(first, second, third)
    assert rig.sent == [first, second], "a third one would make it 40 ms"
    rig.computed(first)
    rig.computed(second)
    await asyncio.sleep(0.03)
    assert rig.sent == [first, second]
    rig.end(first)
    await asyncio.wait_for(tasks[2], 5)
    for request in (second, third):
        rig.end(request)
    rig.is_clean()


async def test_a_time_per_token_that_nobody_reaches_is_refused() -> None:
    rig = Rig().pair()
    rig.load("d0", running=1, step_ms=50.0)
    with pytest.raises(RequestError, match=r"one sequence alone takes 50\.0 ms") as raised:
        await rig.enter(rig.request(slo=SLO(tpot_ms=20)))
    assert raised.value.code is ErrorCode.OVERLOADED
    assert rig.refusals("tpot") == 1
    rig.is_clean()


async def test_an_old_step_time_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig().pair()
    rig.load("d0", running=1, step_ms=50.0)
    with pytest.raises(RequestError):
        await rig.enter(rig.request(slo=SLO(tpot_ms=20)))
    monkeypatch.setattr(rooms, "FORGET_S", 0.01)
    await asyncio.sleep(0.02)
    rig.load("d0", step_ms=50.0)  # idle: it has made no step since
    asked = rig.request(slo=SLO(tpot_ms=20))
    assert await rig.enter(asked) is not None
    rig.end(asked)
    rig.is_clean()


async def test_a_decode_worker_takes_no_more_sequences_than_it_runs() -> None:
    rig = Rig().pair()
    asked = [rig.request(tokens=20) for _ in range(5)]
    await rig.start(*asked[:4])
    for request in asked[:4]:
        rig.computed(request)
    (fifth,) = await rig.start(asked[4])
    assert not fifth.done()
    refused = rig.request(tokens=20, slo=SLO(ttft_ms=100))
    with pytest.raises(RequestError, match="waiting for a decode worker"):
        await rig.enter(refused)
    rig.end(asked[0])
    await asyncio.wait_for(fifth, 5)
    for request in asked[1:]:
        rig.end(request)
    rig.is_clean()


async def test_a_worker_that_is_full_is_passed_over_for_another() -> None:
    rig = Rig().pair()
    asked = [rig.request(tokens=20) for _ in range(5)]
    await rig.start(*asked[:4])
    for request in asked[:4]:
        rig.computed(request)
    rig.join("d1", "decode")
    rig.load("d1", step_ms=1000.0)
    await rig.enter(asked[4])
    assert rig.plans[asked[4].request_id].decode_id == "d1"
    for request in asked:
        rig.end(request)
    rig.is_clean()


async def test_nobody_there_is_no_plan() -> None:
    rig = Rig()
    assert await rig.enter(rig.request()) is None
    rig.is_clean()


async def test_a_prompt_that_never_fits_says_so() -> None:
    rig = Rig().pair()
    with pytest.raises(RequestError) as raised:
        await rig.enter(rig.request(tokens=4000 * 16 + 1))
    assert raised.value.code is ErrorCode.NEVER_FITS
    rig.is_clean()
