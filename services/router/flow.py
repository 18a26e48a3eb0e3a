"""Requests in, token events out: admission, one `Run` for each request, and its end in every case."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection

from services.protocol.errors import ErrorCode, RequestError
from services.router.access.tenancy import block_salt
from services.router.deps import Deps
from services.router.plan import check, sampling_proto
from services.router.run import Run
from services.router.timeline import FIRST_TOKEN, Timelines
from services.router.types import RouterRequest, TokenEvent
from services.router.view import RETRY_AFTER_S

_log = logging.getLogger("pdray.router.flow")


class Flow:
    """One for all fronts of a router."""

    def __init__(
        self,
        deps: Deps,
        timelines: Timelines,
        max_model_len: int,
        eos_token_ids: Collection[int],
        draw_seed: Callable[[], int],
    ) -> None:
        """``draw_seed`` gives a fresh 64-bit number for each request without a seed."""
        self._deps = deps
        self._timelines = timelines
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._draw_seed = draw_seed
        self._active = 0
        self._runs: dict[str, Run] = {}
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests between admission and end."""
        return self._active

    def refuse_new(self) -> None:
        """The router stops: what runs goes on, what is new gets 503."""
        self._closing = True
        self._deps.recorder.end_listening()

    async def idle(self, limit_s: float) -> bool:
        """Wait until nothing runs; False where ``limit_s`` was not enough."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stream(self, request: RouterRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one request as they come; the last event of each choice has a finish_reason.

        Closing the generator, or cancelling the task that iterates it, aborts the request on its workers.

        Raises:
            RequestError: before the first event or after it; nothing follows.
        """
        self._admit(request)
        is_front_s = self._timelines.live(request.request_id) is not None
        timeline = self._timelines.open(request.request_id, request.label, request.received_s)
        timeline.prompt_tokens, timeline.slo = len(request.prompt_ids), request.slo
        timeline.is_pooled = request.pools
        self._count(1)
        run: Run | None = None
        outcome = "cancelled"
        try:
            check(request, self._max_model_len)
            seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
            sampling = sampling_proto(request.sampling, seed, self._eos_token_ids)
            run = self._runs[request.request_id] = Run(self._deps, request, sampling, timeline)
            await run.begin()
            while True:
                event = await run.next_event()
                timeline.mark(FIRST_TOKEN)
                if run.is_finished:
                    outcome = "ok"
                yield event
                if run.is_finished:
                    return
        except RequestError as error:
            outcome = str(error.code)
            raise
        finally:
            self._count(-1)
            if run is not None:
                del self._runs[request.request_id]
                self._record(request, timeline.output_tokens)
                run.close(outcome)
            if not is_front_s:
                timeline.close(outcome)

    def end_choice(self, request_id: str, choice: int) -> None:
        """One choice of a running request is not wanted any more; its workers are told, the others go on."""
        if (run := self._runs.get(request_id)) is not None:
            run.end_choice(choice)

    def _admit(self, request: RouterRequest) -> None:
        limit = self._deps.config.router.max_queue
        if self._closing:
            raise RequestError(ErrorCode.OVERLOADED, "this router is stopping", retry_after_s=RETRY_AFTER_S)
        if self._active >= limit:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{self._active} requests are in this router, its limit is {limit} (router.max_queue)",
                retry_after_s=RETRY_AFTER_S,
            )
        _log.debug("request %s: %d prompt tokens", request.request_id, len(request.prompt_ids))

    def _record(self, request: RouterRequest, output_tokens: int) -> None:
        """A request that was let in or refused for its times is part of the traffic; one that was wrong is not."""
        if self._deps.recorder.is_active and not request.pools:
            salt = block_salt(request.tenant, request.salt)
            self._deps.recorder.note(request.received_s, request.prompt_ids, salt, output_tokens)

    def _count(self, change: int) -> None:
        self._active += change
        self._deps.metrics.in_flight.set(self._active)
        if self._active:
            self._idle.clear()
        else:
            self._idle.set()
