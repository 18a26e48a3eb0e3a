"""Prompts share exactly what they are meant to share, and have the lengths that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from services.bench.load.prompts import WORDS, IdRange, Prompt, Segment, num_tokens, shared_tokens, text, token_ids
from services.bench.load.trace import BLOCK_TOKENS, Replay, TraceLine, read_trace
from services.bench.load.workloads import RandomLengths, SharedPrefixes

IDS = IdRange(1000, 2**31)  # so wide that unrelated tokens do not meet by chance
CONVERSATION = Path(__file__).parents[3] / "shared/data/traces/mooncake_conversation.jsonl"

segments = st.builds(Segment, st.tuples(st.integers(0, 2)), st.integers(1, 4))
prompts = st.lists(st.lists(segments, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(st.integers(0, 9), st.integers(1, 200), st.integers(1, 200))
def test_segments_of_one_key_begin_alike_whatever_their_length(key: int, a: int, b: int) -> None:
    short, long = (token_ids((Segment((key,), n),), IDS) for n in sorted((a, b)))
    assert long[: len(short)] == short


@given(prompts)
def test_shared_tokens_are_those_of_the_longest_earlier_prefix(made: list[Prompt]) -> None:
    made = [tuple(Segment((i, *s.key), s.num_tokens) for i, s in enumerate(prompt)) for prompt in made]
    ids = [token_ids(prompt, IDS) for prompt in made]
    brute = [max((common(x, y) for y in ids[:i]), default=0) for i, x in enumerate(ids)]
    assert shared_tokens(made) == brute


def test_ids_stay_in_their_range_and_text_has_one_word_for_each() -> None:
    prompt = (Segment((1,), 500), Segment((2,), 300))
    ids = token_ids(prompt, IdRange(16, 512))
    assert len(ids) == num_tokens(prompt) == 800
    assert min(ids) >= 16
    assert max(ids) < 512
    assert len(set(ids)) > 300
    words = text(prompt).split(" ")
    assert len(words) == 800
    assert set(words) <= set(WORDS)


def test_random_lengths_vary_within_their_ratio_and_only_then() -> None:
    fixed = RandomLengths(input_tokens=100, output_tokens=20).items(50, seed=1)
    assert {(num_tokens(x.prompt), x.output_tokens) for x in fixed} == {(100, 20)}
    varied = RandomLengths(input_tokens=100, output_tokens=20, range_ratio=0.5).items(500, seed=1)
    lengths = [num_tokens(x.prompt) for x in varied]
    assert 50 <= min(lengths) < 60 < 140 < max(lengths) <= 150
    assert 10 <= min(x.output_tokens for x in varied) < max(x.output_tokens for x in varied) <= 30


def test_random_prompts_share_their_prefix_and_nothing_more() -> None:
    items = RandomLengths(input_tokens=30, prefix_tokens=12).items(5, seed=3)
    assert shared_tokens(x.prompt for x in items) == [0, 12, 12, 12, 12]
    ids = [token_ids(x.prompt, IDS) for x in items]
    assert {common(ids[0], other) for other in ids[1:]} == {12}


def test_another_seed_shares_nothing() -> None:
    workload = RandomLengths(input_tokens=30, prefix_tokens=12)
    a, b = (token_ids(workload.items(1, seed)[0].prompt, IDS) for seed in (1, 2))
    assert common(a, b) == 0


def test_prefixes_are_taken_in_turn_without_zipf() -> None:
    items = SharedPrefixes(prefix_tokens=8, suffix_tokens=4, num_prefixes=3).items(9, seed=0)
    assert shared_tokens(x.prompt for x in items) == [0, 0, 0] + [8] * 6


def test_zipf_takes_the_kth_prefix_in_proportion() -> None:
    items = SharedPrefixes(prefix_tokens=8, suffix_tokens=4, num_prefixes=4, zipf_alpha=1.0).items(6000, seed=0)
    counts = [sum(x.prompt[0].key[2] == k for x in items) for k in range(4)]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for k, count in enumerate(counts):
        expected = 6000 / (k + 1) / total
        assert abs(count - expected) < 4 * expected**0.5, counts


@pytest.mark.parametrize("length_scale", [1.0, 0.25])
def test_prompts_of_a_trace_share_the_blocks_that_have_equal_ids(length_scale: float) -> None:
    lines = [
        TraceLine(0.0, 1500, 10, (1, 2, 3)),
        TraceLine(1.0, 1400, 10, (1, 2, 4)),
        TraceLine(2.0, 600, 10, (1, 5)),
        TraceLine(3.0, 700, 10, (6, 2)),
    ]
    items = Replay(length_scale=length_scale).items(lines, seed=0)
    ids = [token_ids(x.prompt, IDS) for x in items]
    block = BLOCK_TOKENS * length_scale
    assert [len(x) for x in ids] == [round(x.input_tokens * length_scale) for x in lines]
    assert [common(ids[0], x) for x in ids[1:]] == [2 * block, block, 0]
    assert {x.output_tokens for x in items} == {round(10 * length_scale)}


def test_a_prompt_longer_than_its_blocks_gets_a_tail_of_its_own() -> None:
    items = Replay().items([TraceLine(0.0, 600, 1, (1,)), TraceLine(0.0, 600, 1, (1,))], seed=0)
    assert [num_tokens(x.prompt) for x in items] == [600, 600]
    assert shared_tokens(x.prompt for x in items) == [0, 512]


def test_a_cut_begins_at_zero_and_is_stretched() -> None:
    lines = [TraceLine(float(t), 10, 1, ()) for t in (0, 4, 5, 9)]
    replay = Replay(start_s=3, end_s=9, time_scale=2)
    cut = replay.cut(lines)
    assert [x.at_s for x in cut] == [4, 5]
    assert replay.offsets_s(cut) == [0, 2]


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the public trace is not on this machine")
def test_the_public_trace_is_read_whole() -> None:
    lines = read_trace(CONVERSATION)
    assert len(lines) == 12031
    two_minutes = Replay(end_s=120).cut(lines)
    assert 100 < len(two_minutes) < 1000
    assert max(Replay(end_s=120).offsets_s(two_minutes)) < 120


@pytest.mark.parametrize(
    "row",
    [
        "no json",
        "[]",
        json.dumps({"timestamp": 1, "input_length": 4}),
        json.dumps({"timestamp": -1, "input_length": 4, "output_length": 1}),
        json.dumps({"timestamp": 1, "input_length": -4, "output_length": 1}),
        json.dumps({"timestamp": 1, "input_length": 4, "output_length": True}),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, row: str) -> None:
    good = json.dumps({"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]})
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{good}\n{row}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2"):
        read_trace(file)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match="--dataset-path"):
            read_trace(tmp_path / name)
