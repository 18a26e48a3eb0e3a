"""The arithmetic of a run: what counts, what is absent, and when a run is not to be believed."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.bench.load.records import Record
from services.bench.load.show import detailed, json_line
from services.bench.load.summary import Conditions, Slo, distribution, summarize


def record(index: int = 0, **changes: Any) -> Record:
    """Due at 10, sent at 10.5, tokens from 11.0 to 12.0: 5 tokens in 3 chunks."""
    values: dict[str, Any] = {
        "index": index,
        "due_s": 10.0,
        "sent_s": 10.5,
        "first_s": 11.0,
        "last_s": 12.0,
        "done_s": 12.0,
        "lag_s": 0.001,
        "chunks": 3,
        "gaps_s": array("d", [0.25, 0.75]),
        "input_tokens": 100,
        "output_tokens": 5,
        "cached_tokens": 0,
    }
    return Record(**{**values, **changes})


def failed(index: int, **changes: Any) -> Record:
    return record(index, **{"error": "closed: gone", **changes})


def test_latencies_count_from_the_scheduled_send() -> None:
    result = summarize([record()], Conditions())
    expected = {"ttft": 1000, "tpot": 250, "itl": 500, "e2el": 2000, "service_ttft": 500, "service_e2el": 1500}
    assert {name: result[f"mean_{name}_ms"] for name in expected} == pytest.approx(expected)


def test_keys_are_those_of_vllm_bench_serve() -> None:
    result = summarize([record()], Conditions(percentiles=(50, 99)))
    named = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p50", "p99") for m in ("ttft", "tpot", "itl", "e2el")}
    named |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    named |= {"request_goodput", "output_throughput", "total_token_throughput"}
    assert named <= result.keys()


def test_rates_are_over_first_due_to_last_end() -> None:
    result = summarize([record(0), record(1, due_s=13.0, sent_s=13.0, done_s=20.0)], Conditions())
    assert result["duration"] == 10
    assert result["request_throughput"] == 0.2
    assert result["output_throughput"] == 1
    assert result["total_token_throughput"] == 21


def test_failures_lengthen_the_run_and_add_nothing_to_it() -> None:
    good = [record(i) for i in range(3)]
    bad = [failed(3, first_s=19.0, last_s=20.0, done_s=20.0), failed(4, error="http_503: full", done_s=11.0)]
    result = summarize([*good, *bad], Conditions(slo=Slo({"e2el": 9999.0})))
    assert (result["completed"], result["failed"]) == (3, 2)
    assert result["errors"] == {"closed": 1, "http_503": 1}
    assert result["total_output_tokens"] == 15
    assert result["request_throughput"] == result["request_goodput"] == pytest.approx(0.3)
    alone = summarize(good, Conditions())
    assert {k: v for k, v in result.items() if k.endswith("l_ms")} == {
        k: v for k, v in alone.items() if k.endswith("l_ms")
    }
    assert result["mean_ttft_ms"] == alone["mean_ttft_ms"]


def test_one_token_has_no_tpot_and_spoils_none() -> None:
    one = record(0, output_tokens=1, chunks=1, gaps_s=array("d"), last_s=11.0)
    alone = summarize([one], Conditions(slo=Slo({"ttft": 2000.0, "tpot": 60.0})))
    assert (alone["mean_tpot_ms"], alone["p99_tpot_ms"], alone["mean_itl_ms"]) == (None, None, None)
    assert alone["request_goodput"] == alone["request_throughput"]
    both = summarize([one, record(1)], Conditions())
    assert both["mean_tpot_ms"] == 250


def test_several_tokens_in_one_chunk_for_all_have_no_tpot() -> None:
    result = summarize([record(chunks=1, gaps_s=array("d"), last_s=11.0)], Conditions())
    assert (result["mean_tpot_ms"], result["total_output_tokens"]) == (None, 5)


def test_an_answer_without_tokens_has_an_end_and_no_first_token() -> None:
    empty = record(output_tokens=0, chunks=0, gaps_s=array("d"), first_s=12.0)
    result = summarize([empty], Conditions(slo=Slo({"ttft": 1500.0})))
    assert (result["mean_ttft_ms"], result["mean_e2el_ms"], result["total_output_tokens"]) == (None, 2000, 0)
    assert result["tokens_per_chunk"] is None
    assert result["request_goodput"] == 0  # its end, at 2,000 ms, is over the bound


@pytest.mark.parametrize(("bounds", "good"), [("ttft:1000 tpot:250", 1), ("ttft:999", 0), ("e2el:2000 tpot:249", 0)])
def test_goodput_counts_requests_that_keep_every_bound(bounds: str, good: int) -> None:
    result = summarize([record()], Conditions(slo=Slo.parse(bounds.split())))
    assert result["request_goodput"] == good / 2


@pytest.mark.parametrize("pair", ["ttft", "itl:5", "ttft:x", "tpot:0", "e2el:-1", "ttft:nan"])
def test_a_bad_goodput_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        Slo.parse([pair])


def test_percentiles_are_exact_on_a_line() -> None:
    seen = distribution([x / 1000 for x in range(101)], (50, 90, 99))
    assert {k: seen[k] for k in ("mean", "p50", "p90", "p99")} == pytest.approx(
        {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    )


def test_hits_are_weighed_by_tokens() -> None:
    rows = [record(0, cached_tokens=96), record(1, input_tokens=300, cached_tokens=0), record(2, cached_tokens=None)]
    result = summarize(rows, Conditions())
    assert result["cache_hit_rate"] == 0.24
    assert summarize([record(cached_tokens=None)], Conditions())["cache_hit_rate"] is None


def test_a_hit_beyond_what_the_run_itself_shares_means_a_warm_cache() -> None:
    rows = [record(0), record(1, cached_tokens=64)]
    assert not summarize(rows, Conditions(shared_tokens={0: 0, 1: 64}))["warm_cache"]
    warm = summarize(rows, Conditions(shared_tokens={0: 0, 1: 32}))
    assert (warm["warm_cache"], warm["warm_cache_tokens"]) == (True, 32)
    missed = summarize(rows, Conditions(shared_tokens={0: 64, 1: 32}))  # a miss makes up for no foreign hit
    assert missed["warm_cache_tokens"] == 32
    assert not summarize(rows, Conditions(shared_tokens={0: 0, 1: 32}, slack_tokens=32))["warm_cache"]


def test_answers_without_usage_make_a_run_invalid() -> None:
    result = summarize([record(0), record(1, output_tokens=None)], Conditions())
    assert not result["valid"]
    assert "1 answers had no usage" in result["invalid_reasons"][0]


@pytest.mark.parametrize(
    ("rows", "conditions", "word"),
    [
        ([record(lag_s=0.2)], Conditions(), "sent requests late"),
        ([record()], Conditions(loop_lags_s=[0.2] * 5), "read answers late"),
        ([record()], Conditions(is_interrupted=True), "interrupted"),
        ([failed(0)], Conditions(), "no request succeeded"),
        ([], Conditions(), "no request succeeded"),
        ([record(0), failed(1, error="client_limit: no sockets")], Conditions(), "1 requests failed for want of"),
    ],
)
def test_a_run_that_proves_nothing_is_invalid(rows: list[Record], conditions: Conditions, word: str) -> None:
    result = summarize(rows, conditions)
    assert not result["valid"]
    assert any(word in reason for reason in result["invalid_reasons"])


records = st.builds(
    lambda ok, due, wait, ttft, gaps, tokens, told: Record(
        index=0,
        due_s=due,
        sent_s=due + wait,
        first_s=due + wait + ttft if ok else None,
        last_s=due + wait + ttft + sum(gaps) if ok else None,
        done_s=due + wait + ttft + sum(gaps),
        lag_s=wait if told else None,
        chunks=len(gaps) + 1 if ok else 0,
        gaps_s=array("d", gaps),
        input_tokens=tokens if told else None,
        output_tokens=tokens if told else None,
        cached_tokens=tokens // 2 if told else None,
        error="" if ok else "closed: gone",
    ),
    st.booleans(),
    *[st.floats(0, 100)] * 3,
    st.lists(st.floats(0, 10), max_size=5),
    st.integers(0, 9),
    st.booleans(),
)


@given(st.lists(records, max_size=6))
def test_nothing_is_ever_negative_or_not_a_number(rows: list[Record]) -> None:
    result = summarize(rows, Conditions(slo=Slo({"ttft": 500.0})))
    numbers = {k: v for k, v in result.items() if isinstance(v, int | float)}
    assert {k: v for k, v in numbers.items() if v < 0} == {}
    assert json.loads(json_line(result)) == result  # which refuses NaN
    json_line(detailed(result, rows))
    assert result["completed"] + result["failed"] == len(rows)
