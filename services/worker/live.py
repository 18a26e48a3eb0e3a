"""Requests that live on this worker, and the attempts that may not come back.

Only the router opens attempts. The highest attempt of a request wins; it and every abort are remembered until the
request's budget ends, so that a message that arrives late opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2


@dataclass(slots=True)
class LiveRequest:
    """One attempt of one request on this worker."""

    request: worker_pb2.Request
    accepted_s: float  # monotonic
    deadline_s: float
    seq_id: str = ""
    first_output_s: float = 0.0
    started_s: float = 0.0  # decode: verified
    source: worker_pb2.Source | None = None  # a worker that holds leading blocks of the prompt
    kv_load_ms: float = 0.0  # waited for it
    emitted: dict[int, int] = field(default_factory=dict)  # choice -> output tokens so far
    num_prompt_tokens: int = field(init=False, default=0)
    open_choices: set[int] = field(init=False, default_factory=set)  # that have not ended on this worker
    num_drawn: int = field(init=False, default=0)  # choices of this attempt; others ended in an earlier one
    computes_here: bool = False  # a decode worker that computes the prompt itself, since every other way has failed

    def __post_init__(self) -> None:
        self.seq_id = f"{self.request.request_id}.{self.request.attempt}"
        self.num_prompt_tokens = len(self.request.prompt_ids)
        self.open_choices = {o.choice for o in self.request.outputs} or set(range(self.num_choices))
        self.num_drawn = len(self.open_choices)

    @property
    def num_choices(self) -> int:
        return max(1, self.request.n)

    @property
    def tokens(self) -> int:
        """Output tokens of all choices, emitted so far."""
        return sum(self.emitted.values())

    @property
    def router(self) -> tuple[str, str]:
        return self.request.router_id, self.request.router_epoch

    def remaining_s(self, now_s: float) -> float:
        return max(0.0, self.deadline_s - now_s)


class LiveRequests:
    """All live attempts by sequence id, with the memory of ended ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._closed: dict[str, tuple[int, float]] = {}  # request id -> (highest attempt that may not open, until when)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: worker_pb2.Request) -> LiveRequest:
        """Admit an attempt. Raises RequestError STALE for one that was aborted, ended, or is not the highest."""
        now = self._clock()
        ended, _until = self._closed.get(request.request_id, (-1, 0.0))
        if request.attempt <= ended:
            raise RequestError(
                ErrorCode.STALE, f"attempt {request.attempt} of {request.request_id} is over (highest ended: {ended})"
            )
        live = LiveRequest(request, accepted_s=now, deadline_s=now + request.remaining_ms / 1000)
        if live.seq_id in self._live:
            raise RequestError(ErrorCode.STALE, f"attempt {request.attempt} of {request.request_id} is open already")
        self._live[live.seq_id] = live
        return live

    def get(self, seq_id: str) -> LiveRequest | None:
        return self._live.get(seq_id)

    def find(self, request_id: str) -> LiveRequest | None:
        """The highest live attempt of a request."""
        mine = [r for r in self._live.values() if r.request.request_id == request_id]
        return max(mine, key=lambda r: r.request.attempt, default=None)

    def close(self, seq_id: str) -> None:
        live = self._live.pop(seq_id, None)
        if live is not None:
            self._remember(live.request.request_id, live.request.attempt, live.deadline_s)

    def forbid(self, request_id: str, attempt: int, for_s: float) -> list[LiveRequest]:
        """A tombstone: no attempt up to this one may open. Returns the live ones among them; the caller ends those."""
        self._remember(request_id, attempt, self._clock() + for_s)
        mine = [r for r in self._live.values() if r.request.request_id == request_id]
        return [r for r in mine if r.request.attempt <= attempt]

    def of_router(self, router: tuple[str, str]) -> list[LiveRequest]:
        return [r for r in self._live.values() if r.router == router]

    def overdue(self) -> list[LiveRequest]:
        """Requests whose budget is spent; also forgets attempts whose budget ended long ago."""
        now = self._clock()
        for request_id in [k for k, (_, until) in self._closed.items() if until < now]:
            del self._closed[request_id]
        return [r for r in self._live.values() if r.deadline_s <= now]

    def all(self) -> list[LiveRequest]:
        return list(self._live.values())

    def _remember(self, request_id: str, attempt: int, until_s: float) -> None:
        before, until = self._closed.get(request_id, (-1, 0.0))
        self._closed[request_id] = (max(before, attempt), max(until, until_s, self._clock() + 10.0))
