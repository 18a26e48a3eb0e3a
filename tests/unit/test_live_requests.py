"""Only the highest attempt lives, and what was aborted does not come back."""

from __future__ import annotations

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.worker.live import LiveRequests


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(request_id: str = "r", attempt: int = 0, remaining_ms: int = 60_000) -> worker_pb2.Request:
    return worker_pb2.Request(
        request_id=request_id,
        attempt=attempt,
        remaining_ms=remaining_ms,
        prompt_ids=[1, 2],
        router_id="a",
        router_epoch="1",
    )


def test_an_ended_attempt_does_not_open_again_but_a_higher_one_does() -> None:
    live = LiveRequests(Clock())
    first = live.open(request(attempt=1))
    live.close(first.seq_id)
    for attempt in (0, 1):
        with pytest.raises(RequestError) as refused:
            live.open(request(attempt=attempt))
        assert refused.value.code is ErrorCode.STALE
    assert live.open(request(attempt=2)).seq_id == "r.2"


def test_an_abort_that_arrives_before_its_request_leaves_a_tombstone() -> None:
    live = LiveRequests(Clock())
    assert live.forbid("r", 0, for_s=30) == []
    with pytest.raises(RequestError):
        live.open(request())
    assert live.open(request("other")).request.request_id == "other"


def test_an_abort_ends_its_own_and_lower_attempts_only() -> None:
    live = LiveRequests(Clock())
    low, high = live.open(request(attempt=0)), live.open(request(attempt=1))
    assert live.forbid("r", 0, for_s=30) == [low]
    assert live.find("r") is high


def test_the_same_attempt_cannot_be_open_twice() -> None:
    live = LiveRequests(Clock())
    live.open(request())
    with pytest.raises(RequestError):
        live.open(request())


def test_a_request_is_overdue_when_its_budget_is_spent_and_tombstones_are_forgotten_later() -> None:
    clock = Clock()
    live = LiveRequests(clock)
    short, long = live.open(request("short", remaining_ms=500)), live.open(request("long"))
    clock.now += 1
    assert live.overdue() == [short]
    live.close(short.seq_id)
    live.close(long.seq_id)
    clock.now += 3600
    assert live.overdue() == []
    assert live.open(request("short")).seq_id == "short.0"


def test_requests_are_found_by_the_router_that_owns_them() -> None:
    live = LiveRequests(Clock())
    mine = live.open(request())
    assert live.of_router(("a", "1")) == [mine]
    assert live.of_router(("a", "2")) == []
