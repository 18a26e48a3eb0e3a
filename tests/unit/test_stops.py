"""Stop strings against a brute force over all prefixes of the text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.stops import StopMatcher


def cut_by_hand(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop that is complete first, at one place the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


texts = st.text(alphabet="abc é", max_size=40)
stop_texts = st.text(alphabet="abc é", min_size=1, max_size=5)


@settings(deadline=None)
@given(
    text=texts,
    stops=st.lists(st.text(alphabet="abc é", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 40)),
)
def test_streamed_text_is_the_text_cut_before_the_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces_of(text, cuts)) + matcher.flush()
    assert (out, matcher.matched) == cut_by_hand(text, stops)


@settings(deadline=None)
@given(text=texts, stops=st.lists(stop_texts, min_size=1, max_size=4))
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher, fed, out = StopMatcher(stops), "", ""
    for char in text:
        fed, out = fed + char, out + matcher.push(char)
        if matcher.matched is not None:
            return
        held = fed[len(out) :]
        longest = max((n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])), default=0)
        assert held == fed[len(fed) - longest :]


def test_a_stop_that_is_complete_first_wins_over_one_that_starts_earlier() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabcd") == "xa"
    assert matcher.matched == "bc"


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == "a "
    assert matcher.push("OP b") == ""
    assert (matcher.push("more"), matcher.flush()) == ("", "")


def test_a_near_miss_is_released_with_the_text_that_breaks_it() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("STO") == ""
    assert matcher.push("RM") == "STORM"
    assert matcher.push(" ST") == " "
    assert matcher.flush() == "ST"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["", "x"])
