"""A link to one worker, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.protocol.proto import worker_pb2
from services.router.links import Link, RouterIdentity
from tests.fake_worker import SECRET, Cluster

TICKS = 60
"""Turns of the event loop in which a link that is described at once attaches and reads."""


class Owner:
    """Lets every worker attach."""

    def may_attach(self, link: Link, registration: worker_pb2.Registration) -> str:
        return ""

    def on_attached(self, link: Link) -> None: ...
    def on_message(self, link: Link, message: worker_pb2.WorkerMessage) -> None: ...
    def on_detached(self, link: Link) -> None: ...
    def on_lost(self, link: Link, reason: str) -> None: ...


async def test_a_link_can_be_stopped_at_any_moment_of_attaching(monkeypatch: Any) -> None:
    cluster = Cluster()
    worker = await cluster.add("p0", "prefill")

    async def described(calls: Any, timeout_s: float) -> worker_pb2.Registration:
        return worker.registration

    monkeypatch.setattr("services.router.calls.WorkerCalls.describe", described)
    for ticks in range(TICKS):
        link = Link(worker.address, RouterIdentity("r", "e"), SECRET, Owner(), 2.0, time.monotonic)
        link.start()
        for _ in range(ticks):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await link.stop()
    await cluster.stop()
