"""Timelines: parts that add up, and a ring that forgets."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.protocol.proto import worker_pb2
from services.router.breakdown import REST_PARTS, TTFT_PARTS, Points, Stages, rest_parts, ttft_parts
from services.router.timeline import MAX_EVENTS, Timeline, Timelines
from services.router.types import ACCEPT, FIRST_BYTE, TOKENIZED

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

moments = st.none() | st.integers(0, 10**10)
durations = st.floats(0, 1e7) | st.just(float("inf"))
stages = st.builds(
    Stages,
    queue_ms=durations,
    kv_load_ms=durations,
    compute_ms=durations,
    transfer_exposed_ms=durations,
    wait_ms=durations,
)


@untimed
@given(moments, moments, moments, st.integers(0, 10**10), st.integers(0, 10**10), stages)
def test_parts_are_never_negative_and_add_up_exactly(
    accept: int | None, tokenized: int | None, submitted: int | None, first: int, rest: int, measured: Stages
) -> None:
    points = Points(
        accept_us=accept, tokenized_us=tokenized, submitted_us=submitted, first_byte_us=first, done_us=first + rest
    )
    ttft, after = ttft_parts(points, measured), rest_parts(points, measured)
    assert tuple(ttft) == TTFT_PARTS
    assert tuple(after) == REST_PARTS
    assert min(*ttft.values(), *after.values()) >= 0
    assert sum(ttft.values()) == first
    assert sum(ttft.values()) + sum(after.values()) == first + rest


def test_each_part_is_the_time_between_its_two_moments() -> None:
    points = Points(accept_us=1000, tokenized_us=3000, submitted_us=4000, first_byte_us=50_000, done_us=90_000)
    measured = Stages(queue_ms=5, kv_load_ms=1, compute_ms=30, transfer_exposed_ms=7, wait_ms=2)
    assert ttft_parts(points, measured) == {
        "accept": 1000, "tokenize": 2000, "router_queue": 1000, "p_queue": 5000, "kv_load": 1000, "prefill": 30_000,
        "first_emit": 10_000,
    }  # fmt: skip
    assert rest_parts(points, measured) == {"exposed_transfer": 7000, "d_wait": 2000, "decode": 31_000}


def test_nothing_is_claimed_before_the_first_byte_or_the_end() -> None:
    assert ttft_parts(Points(accept_us=1), Stages()) == {}
    assert rest_parts(Points(first_byte_us=5), Stages()) == {}


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def served(timelines: Timelines, clock: Clock, request_id: str = "r1", label: str = "") -> Timeline:
    """A pair's request in ms: 1 accept, 2 tokenize, 1 to submit, 20 at P (5 queued), 10 more to hand off, 40 decode."""
    t = timelines.open(request_id, label, clock.now_s)
    for name, after_s in ((ACCEPT, 0.001), (TOKENIZED, 0.002)):
        clock.now_s += after_s
        t.mark(name)
    clock.now_s += 0.001
    t.begin_attempt(1, "submit", ("p0", "d0"), {"predicted_ms": 20})
    clock.now_s += 0.022
    t.first_token_times(1, worker_pb2.StageTimes(queue_ms=5, compute_ms=15), cached_tokens=32)
    t.mark(FIRST_BYTE)
    clock.now_s += 0.010
    t.handoff_report(
        worker_pb2.HandoffReport(
            request_id=request_id, attempt=1, state="committed", bytes=999, layers=4, transport="tcp"
        )
    )
    t.decode_times(worker_pb2.StageTimes(wait_ms=3))
    clock.now_s += 0.040
    t.close("ok")
    return t


def test_a_finished_request_shows_its_pair_its_parts_and_what_moved(clock: Clock) -> None:
    timelines = Timelines(8, clock=clock)
    served(timelines, clock)
    shown = timelines.find("r1").to_dict()
    json.dumps(shown)
    assert (shown["prefill"], shown["decode"], shown["transport"]) == ("p0", "d0", "tcp")
    assert (shown["bytes_moved"], shown["layers_moved"], shown["cached_tokens"]) == (999, 4, 32)
    assert shown["ttft_ms"] == pytest.approx(26)
    assert shown["e2e_ms"] == pytest.approx(76)
    assert shown["ttft_parts_ms"] == {
        "accept": 1.0, "tokenize": 2.0, "router_queue": 1.0, "p_queue": 5.0, "kv_load": 0.0, "prefill": 15.0,
        "first_emit": 2.0,
    }  # fmt: skip
    assert shown["rest_parts_ms"] == {"exposed_transfer": 10.0, "d_wait": 3.0, "decode": 37.0}
    assert shown["outcome"] == "ok"
    assert shown["attempts"][0]["decision"] == {"predicted_ms": 20}


def test_a_late_hand_off_report_still_enters_a_finished_timeline(clock: Clock) -> None:
    timelines = Timelines(8, clock=clock)
    t = timelines.open("r1")
    t.close("ok")
    t.handoff_report(worker_pb2.HandoffReport(request_id="r1", state="committed", bytes=5, layers=1, transport="tcp"))
    assert timelines.find("r1").to_dict()["bytes_moved"] == 5


def test_the_queue_part_ends_with_the_attempt_that_gave_token_1(clock: Clock) -> None:
    t = Timelines(8, clock=clock).open("r1")
    t.begin_attempt(1, "submit", ("p0", "d0"), {})
    clock.now_s += 1
    t.begin_attempt(2, "submit", ("p1", "d0"), {})
    clock.now_s += 1
    t.first_token_times(2, worker_pb2.StageTimes(), 0)
    t.mark(FIRST_BYTE)
    t.begin_attempt(3, "retarget", ("p1", "d1"), {})
    t.close("ok")
    shown = t.to_dict()
    assert shown["ttft_parts_ms"]["router_queue"] == 1000.0
    assert shown["decode"] == "d1"


def test_only_the_first_mark_of_a_name_and_the_first_close_count(clock: Clock) -> None:
    closed: list[str] = []
    timelines = Timelines(8, clock=clock, on_close=lambda t: closed.append(t.outcome))
    t = timelines.open("r1")
    t.mark(FIRST_BYTE)
    clock.now_s += 1
    t.mark(FIRST_BYTE)
    t.close("ok")
    t.close("internal_error")
    assert (t.ttft_ms, t.outcome, closed) == (0.0, "ok", ["ok"])


def test_opening_twice_gives_the_same_timeline_and_time_zero_is_the_first(clock: Clock) -> None:
    timelines = Timelines(8, clock=clock)
    first = timelines.open("r1", received_s=5.0)
    assert timelines.open("r1", received_s=9.0) is first
    assert first.received_s == 5.0


def test_the_ring_keeps_the_last_ones_and_forgets_their_labels_with_the_rest(clock: Clock) -> None:
    timelines = Timelines(3, clock=clock)
    for i in range(6):
        served(timelines, clock, f"r{i}", f"label{i}")
    assert timelines.find("r2") is None
    assert timelines.find("label2") is None
    assert timelines.find("label5") is timelines.find("r5")
    assert len(timelines) == 3
    assert len(timelines._labels) == 3


def test_a_label_used_twice_finds_the_latest_request(clock: Clock) -> None:
    timelines = Timelines(2, clock=clock)
    for request_id in ("r1", "r2", "r3"):
        served(timelines, clock, request_id, "same")
    assert timelines.find("same").request_id == "r3"
    assert timelines.find("r1") is None


def test_timelines_that_nobody_closes_are_bounded(clock: Clock) -> None:
    timelines = Timelines(2, max_live=3, clock=clock)
    for i in range(10):
        timelines.open(f"r{i}")
    assert len(timelines) == 5
    assert timelines.find("r6").outcome == "abandoned"


def test_events_of_one_request_are_bounded_and_the_rest_is_counted(clock: Clock) -> None:
    t = Timelines(2, clock=clock).open("r1")
    for _ in range(MAX_EVENTS + 7):
        t.note("x")
    assert (len(t.events), t.to_dict()["events_dropped"]) == (MAX_EVENTS, 7)


def test_worker_events_keep_their_distances_and_never_lie_after_their_arrival(clock: Clock) -> None:
    t = Timelines(2, clock=clock).open("r1")
    for after_s, at_ms in ((0.500, 20), (0.010, 50), (0.100, 60)):
        clock.now_s += after_s
        t.worker_event("p0", worker_pb2.TimelineEvent(request_id="r1", attempt=1, name=f"at{at_ms}", at_ms=at_ms))
    placed = {e["name"]: e["at_ms"] for e in t.to_dict()["events"]}
    # The second arrival bounds the worker's time zero to 460 ms; the first was placed before that was known.
    assert placed == {"at20": 500.0, "at50": 510.0, "at60": 520.0}


def test_a_worker_events_detail_is_shown_whatever_it_is(clock: Clock) -> None:
    t = Timelines(2, clock=clock).open("r1")
    event = worker_pb2.TimelineEvent(request_id="r1", attempt=1, name="pushed", at_ms=20)
    for detail in ('{"bytes": 5, "name": "n"}', "no json", "[1]", ""):
        event.detail_json = detail
        t.worker_event("p0", event)
    pushed = [e for e in t.to_dict()["events"] if e["name"] == "pushed"]
    assert [e.get("detail") for e in pushed] == [{"bytes": 5, "name_": "n"}, {"text": "no json"}, None, None]
