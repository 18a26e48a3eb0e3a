"""Circuits: a state machine with the clock as argument, and what an open one does to the view."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.protocol.errors import STATUS, ErrorCode
from services.protocol.proto import worker_pb2
from services.router.health import COUNTED, SAME_S, Circuit, CircuitState, Health
from services.router.member import WorkerState
from services.router.view import View
from services.slo_config import HealthConfig
from tests.fake_worker import fingerprint

SETTINGS = HealthConfig(failures=3, open_s=1.0, max_open_s=5.0, probe_s=10.0)


def opened(at_s: float = 100.0) -> Circuit:
    circuit = Circuit(SETTINGS)
    for i in range(3):
        circuit.failed(at_s - 2 + i)
    return circuit


def test_failures_in_a_row_open_it_and_a_success_between_them_starts_anew() -> None:
    circuit = Circuit(SETTINGS)
    assert [circuit.failed(t) for t in (1.0, 2.0)] == [False, False]
    circuit.succeeded(2.5)
    assert [circuit.failed(t) for t in (3.0, 4.0, 5.0)] == [False, False, True]
    assert circuit.state(5.5) is CircuitState.OPEN
    assert not circuit.admits(5.5)


def test_failures_of_one_moment_count_once() -> None:
    circuit = Circuit(SETTINGS)
    assert not any(circuit.failed(1.0 + i * SAME_S / 1000) for i in range(50))
    assert circuit.failures == 1


def test_half_open_lets_one_probe_through_whose_success_closes_it() -> None:
    circuit = opened()
    assert circuit.admits(101.0)
    assert circuit.state(101.0) is CircuitState.HALF_OPEN
    circuit.sent(101.0)
    assert not circuit.admits(101.1)
    circuit.succeeded(101.2)
    assert circuit.state(101.2) is CircuitState.CLOSED
    assert circuit.admits(101.2)
    assert circuit.failures == 0


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    circuit, now_s, waits = opened(), 100.0, []
    for _ in range(5):
        start_s = now_s
        while not circuit.admits(now_s):
            now_s += 0.125
        waits.append(now_s - start_s)
        circuit.sent(now_s)
        assert circuit.failed(now_s)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_probe_without_a_result_gives_way_to_another() -> None:
    circuit = opened()
    circuit.sent(101.0)
    assert not circuit.admits(110.9)
    assert circuit.admits(111.0)


def test_what_was_sent_before_it_opened_neither_closes_it_nor_keeps_it_open() -> None:
    circuit = opened()
    circuit.succeeded(100.5)
    assert not circuit.failed(100.6)
    assert circuit.state(100.9) is CircuitState.OPEN
    assert circuit.state(101.0) is CircuitState.HALF_OPEN


def test_it_can_be_turned_off() -> None:
    circuit = Circuit(HealthConfig(failures=0))
    assert not any(circuit.failed(float(t)) for t in range(100))
    assert circuit.admits(100.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "sent", "wait"]), st.floats(0.06, 3)), max_size=60))
def test_whatever_happens_it_admits_again_within_its_longest_wait(steps: list[tuple[str, float]]) -> None:
    circuit, now_s = Circuit(SETTINGS), 0.0
    for what, passed_s in steps:
        now_s += passed_s
        if what == "sent" and not circuit.admits(now_s):
            continue
        if what != "wait":
            getattr(circuit, what)(now_s)
        state = circuit.state(now_s)
        assert circuit.admits(now_s) or state is not CircuitState.CLOSED
        assert circuit.open_for_s <= SETTINGS.max_open_s
        assert (state is CircuitState.CLOSED) == (circuit.open_for_s == 0.0)
        longest_s = SETTINGS.max_open_s + SETTINGS.probe_s
        assert circuit.admits(now_s + longest_s)


def test_only_errors_of_the_workers_own_count() -> None:
    assert all(STATUS[code].http >= 500 for code in COUNTED)
    for code in (ErrorCode.OVERLOADED, ErrorCode.INVALID_REQUEST, ErrorCode.CANCELLED, ErrorCode.NEVER_FITS):
        assert code not in COUNTED


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.opened: list[str] = []
        self.view = View("model-a", "tokenizer-a", 60.0, self.clock)
        self.health = Health(SETTINGS, self.view, self.clock, self.opened.append)
        for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
            self.join(worker_id, role)

    def clock(self) -> float:
        return self.now_s

    def join(self, worker_id: str, role: str, **changed: Any) -> None:
        values: dict[str, Any] = {
            "worker_id": worker_id, "role": role, "epoch": "e1", "fingerprint": fingerprint(), "num_blocks": 100,
            "transport": "tcp",
        }  # fmt: skip
        self.view.registered(worker_pb2.Registration(**(values | changed)), f"{worker_id}:1")
        self.view.link_is(worker_id, WorkerState.READY)

    def fail(self, code: ErrorCode, *worker_ids: str, times: int = 3) -> None:
        for _ in range(times):
            self.now_s += 0.1
            self.health.failed(code, worker_ids)

    def ready(self) -> set[str]:
        self.health.judge()
        return {w.worker_id for w in self.view.candidates([])}


@pytest.fixture
def world() -> World:
    return World()


def test_a_worker_with_an_open_circuit_is_no_candidate_until_its_probe(world: World) -> None:
    world.fail(ErrorCode.INTERNAL, "p0")
    assert world.ready() == {"p1", "d0"}
    assert world.opened == ["p0"]
    entry = world.view.entry("p0")
    assert entry is not None
    assert entry.state is WorkerState.TRIPPED
    assert "3 failures in a row; a probe may go there in 1.0 s" in entry.reason
    world.now_s += 1.0
    assert world.ready() == {"p0", "p1", "d0"}
    world.health.sent("p0", "d0")
    assert world.ready() == {"p1", "d0"}
    world.health.succeeded("p0", "")
    assert world.ready() == {"p0", "p1", "d0"}


def test_without_a_live_pair_the_router_is_not_ready(world: World) -> None:
    world.fail(ErrorCode.WORKER_LOST, "d0")
    world.health.judge()
    is_ready, why = world.view.readiness()
    assert not is_ready
    assert "1 decode tripped" in why


def test_a_failed_transfer_counts_for_both_and_the_good_side_is_cleared_by_its_next_success(world: World) -> None:
    for _ in range(3):
        world.fail(ErrorCode.TRANSFER_FAILED, "p0", "d0", times=1)
        world.health.succeeded("p1", "d0")
    assert world.ready() == {"p1", "d0"}


def test_a_probe_that_fails_keeps_the_worker_out_for_longer(world: World) -> None:
    world.fail(ErrorCode.INTERNAL, "p0")
    world.now_s += 1.0
    assert "p0" in world.ready()
    world.health.sent("p0", "d0")
    world.fail(ErrorCode.INTERNAL, "p0", times=1)
    assert world.opened == ["p0", "p0"]
    world.now_s += 1.9
    assert "p0" not in world.ready()
    world.now_s += 0.2
    assert "p0" in world.ready()


def test_failed_transfers_alone_never_leave_nobody(world: World) -> None:
    world.fail(ErrorCode.TRANSFER_FAILED, "p0", "p1", "d0")
    assert world.ready() == {"p0", "p1", "d0"}, "the ladder still has one of them compute everything"
    world.fail(ErrorCode.INTERNAL, "d0", times=2)
    world.now_s += 3.0
    world.fail(ErrorCode.INTERNAL, "d0", times=1)
    assert "d0" not in world.ready()
    assert not world.view.readiness()[0]


def test_client_errors_and_busy_workers_open_nothing(world: World) -> None:
    for code in (ErrorCode.INVALID_REQUEST, ErrorCode.OVERLOADED, ErrorCode.CONTEXT_LENGTH_EXCEEDED):
        world.fail(code, "p0", times=50)
    assert world.ready() == {"p0", "p1", "d0"}


def test_a_lost_worker_is_the_links_business_and_a_new_process_starts_closed(world: World) -> None:
    world.view.link_is("p0", WorkerState.LOST)
    world.fail(ErrorCode.WORKER_LOST, "p0")
    world.view.link_is("p0", WorkerState.READY)
    assert world.ready() == {"p0", "p1", "d0"}
    world.fail(ErrorCode.INTERNAL, "p0")
    assert world.ready() == {"p1", "d0"}
    world.join("p0", "prefill", epoch="e2")
    assert world.ready() == {"p0", "p1", "d0"}
