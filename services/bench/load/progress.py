"""How far a run is: a bar on a terminal, a plain line every few seconds elsewhere. On stderr: stdout is for data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.bench.load.http import Clock
from services.bench.load.records import Record

LINE_EVERY_S = 10.0


class Shown:
    """Counts ended requests. A line costs little, and comes seldom: the tool shares its cores with the server."""

    def __init__(self, console: Console, total: int, clock: Clock) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._next_s = clock() + LINE_EVERY_S
        self.done = self.failed = 0

    def count(self, record: Record) -> None:
        self.done += 1
        self.failed += not record.ok
        self.show()

    def show(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            self._console.print(f"{self.done}/{self._total} requests, {self.failed} failed", highlight=False)


class Bar(Shown):
    """The same as a bar, drawn twice a second by rich."""

    def __init__(self, progress: Progress, total: int, clock: Clock) -> None:
        super().__init__(progress.console, total, clock)
        self._progress = progress
        self._task = progress.add_task("requests", total=total, failed=0)

    def show(self) -> None:
        self._progress.update(self._task, completed=self.done, failed=self.failed)


@contextmanager
def progress(console: Console, total: int, clock: Clock, *, is_off: bool) -> Iterator[Shown]:
    """What the run reports its records to."""
    if is_off:
        yield Shown(Console(quiet=True), total, clock)
    elif not console.is_terminal:
        yield Shown(console, total, clock)
    else:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeElapsedColumn())
        with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
            yield Bar(bar, total, clock)
