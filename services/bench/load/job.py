"""What is to be sent: one request, and in a conversation the one after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.bench.load.workloads import Item


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a run. ``at_s``: when it is due since the start; None in a closed loop and for later turns."""

    index: int
    item: Item
    at_s: float | None = None
    tenant: str = ""
    cancel_after_s: float | None = None  # since its send: the client then hangs up
    conversation: int | None = None  # whose history its prompt begins with
    think_s: float = 0.0  # from the end of the turn before it to its own due moment
    then: Job | None = None


def every(jobs: Iterable[Job]) -> Iterator[Job]:
    """The jobs and those that follow them."""
    for job in jobs:
        current: Job | None = job
        while current is not None:
            yield current
            current = current.then
