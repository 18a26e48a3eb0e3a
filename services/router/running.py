"""Requests that run in this router, whichever front they came by: counted for their caller, and ended on demand.

A tracked stream is the flow's own, but that `Running.abort` makes it raise CANCELLED at once, wherever it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from services.protocol.errors import ErrorCode, RequestError
from services.router.access.caller import Caller
from services.router.types import RouterRequest, TokenEvent, TokenFlow


class _Entry:
    """One running request. ``task`` waits for its next event, where one does."""

    def __init__(self, request: RouterRequest) -> None:
        self.request = request
        self.is_aborted = False
        self.task: asyncio.Task[object] | None = None


class Running:
    """One for all fronts of a router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries: dict[str, _Entry] = {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._entries)

    def flow(self, flow: TokenFlow, caller: Caller) -> TokenFlow:
        """The flow for the requests of one caller."""
        return _TrackedFlow(flow, caller, self._entries, self._clock)

    def abort(self, request_id: str, tenant: str | None) -> int:
        """End the requests with this id or label; how many there were.

        Args:
            tenant: whose requests alone may be ended; None: anybody's.
        """
        found = [
            entry
            for entry in self._entries.values()
            if request_id and request_id in (entry.request.request_id, entry.request.label)
            if tenant is None or entry.request.tenant == tenant
            if not entry.is_aborted
        ]
        for entry in found:
            entry.is_aborted = True
            if entry.task is not None:
                entry.task.cancel()
        return len(found)


class _TrackedFlow:
    def __init__(self, flow: TokenFlow, caller: Caller, entries: dict[str, _Entry], clock: Callable[[], float]) -> None:
        self._flow = flow
        self._caller = caller
        self._is_metered = any(meter.tokens is not None for meter in caller.meters)
        self._entries = entries
        self._clock = clock

    async def stream(self, request: RouterRequest) -> AsyncGenerator[TokenEvent, None]:
        entry = self._entries[request.request_id] = _Entry(request)
        try:
            async with aclosing(self._flow.stream(request)) as events:
                while (event := await _next(events, entry)) is not None:
                    if self._is_metered:
                        self._caller.take_output(len(event.token_ids), self._clock())
                    yield event
        finally:
            del self._entries[request.request_id]

    def end_choice(self, request_id: str, choice: int) -> None:
        self._flow.end_choice(request_id, choice)


async def _next(events: AsyncGenerator[TokenEvent, None], entry: _Entry) -> TokenEvent | None:
    """The next event, None after the last. Whoever waits here may be another task than the last time."""
    if entry.is_aborted:
        raise _aborted(entry)
    task = entry.task = asyncio.current_task()
    try:
        return await anext(events, None)
    except asyncio.CancelledError:
        if entry.is_aborted and task is not None and task.uncancel() == 0:
            raise _aborted(entry) from None
        raise
    finally:
        entry.task = None


def _aborted(entry: _Entry) -> RequestError:
    return RequestError(ErrorCode.CANCELLED, f"the request {entry.request.request_id} was ended by Abort")
