"""Progress is a bar for people and a rare line for logs; neither is data."""

from __future__ import annotations

import io

from rich.console import Console

from services.bench.load.progress import LINE_EVERY_S, progress
from services.bench.load.records import Record


def ended(error: str = "") -> Record:
    return Record(index=0, due_s=0, sent_s=0, done_s=1, error=error)


def test_without_a_terminal_there_is_a_plain_line_now_and_then() -> None:
    now = [100.0]
    out = io.StringIO()
    with progress(Console(file=out), 9, lambda: now[0], is_off=False) as shown:
        shown.count(ended())
        assert out.getvalue() == ""
        now[0] += LINE_EVERY_S
        shown.count(ended("closed: gone"))
        shown.count(ended())
    assert out.getvalue() == "2/9 requests, 1 failed\n"


def test_on_a_terminal_there_is_a_bar_that_leaves_nothing_behind() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, no_color=True)
    with progress(console, 3, lambda: 0.0, is_off=False) as shown:
        shown.count(ended())
        shown.count(ended("closed: gone"))
        shown._progress.refresh()  # type: ignore[attr-defined]
        assert "2/3" in out.getvalue()
        assert "1 failed" in out.getvalue()
    assert (shown.done, shown.failed) == (2, 1)
    assert out.getvalue().endswith("\x1b[2K")  # the line is wiped


def test_switched_off_it_only_counts() -> None:
    out = io.StringIO()
    now = [0.0]
    with progress(Console(file=out, force_terminal=True), 3, lambda: now[0], is_off=True) as shown:
        now[0] = 10 * LINE_EVERY_S
        shown.count(ended())
    assert (out.getvalue(), shown.done) == ("", 1)
