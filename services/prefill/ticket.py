"""The hand-off of one request, which may need several tickets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.protocol.proto import worker_pb2
from services.worker.handoff.ticket import Ticket
from services.worker.live import LiveRequest


@dataclass(slots=True)
class Handoff:
    """One live request of the prefill worker, from Submit to the release of its blocks."""

    live: LiveRequest
    reader: worker_pb2.Reader
    attempt: int
    block_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)  # choice -> its token 1
    first_logprobs: dict[int, worker_pb2.TokenLogprobs] = field(default_factory=dict)  # where they were asked for
    drawn: asyncio.Event = field(default_factory=asyncio.Event)  # all of them are there, and some choice goes on
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # token 1 ended every choice: nothing to hand over
    retarget: asyncio.Queue[worker_pb2.RetargetRequest] = field(default_factory=asyncio.Queue)
    ticket: Ticket | None = None
    is_unreported: bool = False  # no transfer process was there to hear which of its layers are computed
    task: asyncio.Task[None] | None = None
    failed_over: bool = False  # a HandoffReport "failed" is out; the router may retarget

    async def computed(self) -> None:
        """Until the first token of every choice is drawn."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.drawn, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
