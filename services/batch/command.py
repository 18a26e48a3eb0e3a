"""`pdray batch` for people: a bar on a terminal, plain lines elsewhere, and an exit code for scripts.

Exit codes: 0 every line has a good answer, 1 some failed, 2 the input cannot be sent, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.batch.lines import BadInput, BatchAnswer
from services.batch.run import Batch, Plan, Told, plan, run

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
TELL_EVERY_S = 10.0


def batch_main(batch: Batch, console: Console) -> int:
    """Run the batch; returns the exit code."""
    try:
        planned = plan(batch)
    except (BadInput, OSError) as exc:
        _say(console, f"error: {exc}")
        return BAD_INPUT
    if planned.finished:
        _say(console, f"{len(planned.finished)} of {planned.total} lines are answered in {batch.target} already")
    try:
        with _shown(console, planned) as told:
            failed = asyncio.run(run(planned, told))
    except KeyboardInterrupt:
        _say(console, f"interrupted; the same command goes on from {batch.target}")
        return INTERRUPTED
    _say(
        console, f"{planned.total - failed} of {planned.total} lines have an answer in {batch.target}, {failed} failed"
    )
    return SOME_FAILED if failed else OK


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


@contextmanager
def _shown(console: Console, planned: Plan) -> Iterator[Told]:
    """A bar where somebody looks at it; elsewhere a line now and then."""
    if not console.is_terminal:
        yield _Lines(console, planned.left).told
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("batch", total=planned.left, failed=0)
        failed = 0

        def told(answer: BatchAnswer) -> None:
            nonlocal failed
            failed += not answer.is_ok
            progress.update(task, advance=1, failed=failed)

        yield told


class _Lines:
    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._done = self._failed = 0
        self._told_s = time.monotonic()

    def told(self, answer: BatchAnswer) -> None:
        self._done += 1
        self._failed += not answer.is_ok
        if time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._told_s = time.monotonic()
            _say(self._console, f"{self._done}/{self._total} answered, {self._failed} failed")
