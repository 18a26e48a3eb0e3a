"""Targets: where they are read from, what is refused, and which phase a missed one is counted under."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from services.protocol.errors import ErrorCode, RequestError
from services.router.admission.promise import Promise, refusal
from services.router.admission.slo import NO_SLO, SLO, Times, longest_phase, misses, read_slo, slo_headers
from services.slo_config import AdmissionConfig, HealthConfig, SLOConfig

NONE = SLOConfig()


def times(ttft_ms: float = 100.0, e2e_ms: float = 300.0, tokens: int = 11, **parts: int) -> Times:
    first = {k: v for k, v in parts.items() if k not in ("exposed_transfer", "d_wait", "decode")}
    rest = {k: v for k, v in parts.items() if k not in first}
    return Times(ttft_ms=ttft_ms, e2e_ms=e2e_ms, tokens=tokens, first_parts_us=first, rest_parts_us=rest)


def test_headers_come_before_the_body_and_both_before_the_settings() -> None:
    headers = slo_headers([("X-PDRay-TTFT-MS", "250"), (b"x-pdray-tpot-ms", b"30"), ("accept", "*/*")])
    assert headers == {"ttft_ms": "250", "tpot_ms": "30"}
    slo = read_slo(headers, {"ttft_ms": 900, "e2e_ms": 5000}, SLOConfig(tpot_ms=99, e2e_ms=77))
    assert slo == SLO(ttft_ms=250, tpot_ms=30, e2e_ms=5000)
    assert read_slo({}, None, SLOConfig(tpot_ms=99)) == SLO(tpot_ms=99)
    assert not read_slo({}, None, NONE)
    assert read_slo({}, {}, NONE) == NO_SLO


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "", "1e10"])
def test_a_header_that_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError, match="x-pdray-ttft-ms must be milliseconds above 0") as raised:
        read_slo({"ttft_ms": text}, None, NONE)
    assert raised.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("body", [{"ttft_ms": 0}, {"ttft_ms": "fast"}, {"tpot_ms": True}, {"latency_ms": 5}])
def test_a_body_with_what_is_no_target_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="slo"):
        read_slo({}, body, NONE)


def test_a_target_is_missed_where_the_time_is_past_it_and_the_largest_phase_is_named() -> None:
    slo = SLO(ttft_ms=99, tpot_ms=19, e2e_ms=1000)
    took = times(router_queue=30_000, p_queue=30_000, prefill=40_000, d_wait=50_000, decode=150_000)
    assert misses(slo, "ok", took) == {"ttft": "queue", "tpot": "decode"}
    assert misses(SLO(ttft_ms=100, tpot_ms=20, e2e_ms=300), "ok", took) == {}
    assert misses(SLO(e2e_ms=299), "ok", took) == {"e2e": "decode"}


def test_a_failed_request_misses_all_its_targets_and_a_cancelled_one_none() -> None:
    slo = SLO(ttft_ms=1, e2e_ms=2)
    assert misses(slo, "worker_lost", times()) == {"ttft": "failed", "e2e": "failed"}
    assert misses(slo, "cancelled", times()) == {}
    assert misses(NO_SLO, "worker_lost", times()) == {}


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert misses(SLO(tpot_ms=1), "ok", times(tokens=1)) == {}
    assert longest_phase({}) == "failed"


def test_what_is_predicted_past_a_target_is_refused_with_its_numbers_and_a_wait() -> None:
    promise = Promise(waited_ms=5, queue_ms=400, load_ms=0, compute_ms=200, correction=1.5)
    assert promise.ttft_ms == 905
    reason, error = refusal(SLO(ttft_ms=1000), promise, 0.9) or ("", None)
    assert reason == "ttft"
    assert error is not None
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_s == 1.0
    for part in ("905 ms", "600 queue", "300 computing", "1000 ms", "90 %", "slo.ttft_ms", "admission.margin"):
        assert part in error.message
    assert refusal(SLO(ttft_ms=1000), promise, 1.0) is None
    assert refusal(NO_SLO, promise, 0.9) is None


def test_targets_are_compared_with_what_nearly_all_requests_stay_below() -> None:
    promise = Promise(waited_ms=10, queue_ms=300, compute_ms=100, spread=1.5, room_ms=40)
    assert (promise.ttft_ms, promise.late_ms) == (450, 650)
    found = refusal(SLO(ttft_ms=600), promise, 1.0)
    assert found is not None
    assert "predicted after 450 ms" in found[1].message
    assert "by 650 ms in 95 of 100 cases" in found[1].message
    assert refusal(SLO(ttft_ms=650), promise, 1.0) is None


def test_an_idle_worker_is_judged_by_its_rate_alone() -> None:
    slow = Promise(compute_ms=100, correction=4.0, spread=2.0, is_idle=True)
    assert (slow.ttft_ms, slow.late_ms) == (400, 100)
    assert refusal(SLO(ttft_ms=200), slow, 0.9) is None
    fast = Promise(compute_ms=100, correction=0.5, spread=2.0, is_idle=True)
    assert (fast.ttft_ms, fast.late_ms) == (50, 50)


def test_the_advised_wait_is_how_far_the_prediction_is_past_the_target() -> None:
    found = refusal(SLO(ttft_ms=1000), Promise(queue_ms=8900), 0.9)
    assert found is not None
    assert found[1].retry_after_s == 8.0


def test_a_time_per_token_is_out_of_reach_only_where_it_is_even_alone() -> None:
    assert refusal(SLO(tpot_ms=20), Promise(step_ms=30, least_step_ms=15), 0.9) is None
    reason, error = refusal(SLO(tpot_ms=20), Promise(step_ms=30, least_step_ms=21), 0.9) or ("", None)
    assert reason == "tpot"
    assert error is not None
    assert "21.0 ms" in error.message


def test_a_first_token_past_the_whole_answers_target_is_refused_for_that() -> None:
    found = refusal(SLO(e2e_ms=100), Promise(compute_ms=120), 0.9)
    assert found is not None
    assert found[0] == "e2e"


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: SLOConfig(ttft_ms=-1), "slo.ttft_ms"),
        (lambda: AdmissionConfig(order="lifo"), "admission.order"),
        (lambda: AdmissionConfig(max_waiting=0), "admission.max_waiting"),
        (lambda: AdmissionConfig(margin=1.5), "admission.margin"),
        (lambda: AdmissionConfig(weights=("a=0",)), "admission.weights"),
        (lambda: AdmissionConfig(weights=("a",)), "admission.weights"),
        (lambda: HealthConfig(open_s=0), "health.open_s"),
        (lambda: HealthConfig(max_open_s=0.5), "health.max_open_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(make: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make()  # type: ignore[operator]


def test_weights_are_read_by_tenant() -> None:
    assert AdmissionConfig(weights=("a=2", "b c = 0.5")).tenant_weights == {"a": 2.0, "b c": 0.5}
