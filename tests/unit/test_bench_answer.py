"""A streamed answer is read the same way however its bytes are cut, and what is no success is not taken for one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.load.answer import MAX_LINE_BYTES, Answer, EventLines


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()) + b"\n\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def delta(**said: Any) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": said, "finish_reason": None}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
DONE = event(b"[DONE]")


def read(*pieces: bytes) -> Answer:
    """Piece k comes at second k."""
    answer = Answer()
    for at_s, piece in enumerate(pieces):
        answer.feed(piece, float(at_s))
    answer.close(float(len(pieces)))
    return answer


STREAM = b": ping\n\nevent: x\ndata: one\ndata: two\n\ndata:three\r\n\r\n\n\ndata: \xe2\x80\xa8\xc2\x85 \x0c four\n\n"
PAYLOADS = [b"one\ntwo", b"three", "\u2028\u0085 \f four".encode()]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    lines = EventLines()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [payload for a, b in itertools.pairwise(edges) for payload in lines.feed(STREAM[a:b])]
    assert found == PAYLOADS


def test_the_last_event_counts_without_its_empty_line() -> None:
    lines = EventLines()
    assert lines.feed(b"data: end") == []
    assert lines.rest() == [b"end"]
    assert lines.rest() == []


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="a line of more than"):
        EventLines().feed(b"data: " + b"x" * (MAX_LINE_BYTES + 1))


def test_times_are_those_of_chunks_with_text() -> None:
    answer = read(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), chunk("", "stop"), DONE)
    assert (answer.first_s, answer.last_s, answer.chunks, list(answer.gaps_s)) == (1.0, 3.0, 2, [1.0])
    assert answer.failure() == ""


def test_reasoning_is_output_too() -> None:
    answer = read(delta(reasoning_content="hm"), delta(content="a"), DONE)
    assert (answer.first_s, answer.chunks) == (0.0, 2)


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    answer = read(chunk(""), chunk("", "stop"), USAGE, DONE)
    assert (answer.first_s, answer.chunks, list(answer.gaps_s)) == (1.0, 0, [])
    assert answer.failure() == ""


def test_tokens_come_from_usage_whatever_the_chunks_were() -> None:
    answer = read(chunk("one of many tokens", "length"), USAGE, DONE)
    assert answer.count("completion_tokens") == 3
    assert answer.count("prompt_tokens") == 5
    assert answer.cached_tokens is None
    silent = read(chunk("a", "stop"), DONE)
    assert silent.count("completion_tokens") is None


@pytest.mark.parametrize("value", [-1, True, "3", 1.5, None])
def test_a_usage_that_is_no_count_is_no_count(value: Any) -> None:
    answer = read(event({"choices": [], "usage": {"completion_tokens": value}}))
    assert answer.count("completion_tokens") is None


def test_text_with_line_separators_is_one_chunk() -> None:
    answer = read(chunk("a\u2028b\u2029c\u0085d\x0be"), chunk("", "stop"), DONE)
    assert (answer.chunks, answer.failure()) == (1, "")


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((chunk("a"), event({"error": {"message": "the worker died"}}), DONE), "error_event"),
        ((chunk("a", "stop"), event({"error": "text"}), DONE), "error_event"),
        ((chunk("a"),), "cut_off"),
        ((chunk("a"), USAGE), "cut_off"),
        ((DONE,), "empty"),
        ((USAGE, DONE), "empty"),
        ((), "empty"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(pieces: tuple[bytes, ...], kind: str) -> None:
    assert read(*pieces).failure().partition(":")[0] == kind


@pytest.mark.parametrize("payload", [b"{", b"[]", b'"text"', b"\xff"])
def test_an_event_that_is_no_json_object_raises(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Answer().feed(event(payload), 0.0)
