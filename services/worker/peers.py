"""Channels to other workers: one for each process of a peer, opened at first use, closed with this worker.

A channel to an address where nobody answered waits, for up to a second, before it tries again. A peer that has just
started there must not find that wait of its predecessor, so a new epoch gets a channel, and a connection, of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from services.protocol.auth import channel
from services.protocol.proto import worker_pb2_grpc

EPOCHS_KEPT = 2
"""Of one address: the latest, and the one before, whose tickets are still being closed."""


class Peers:
    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._channels: dict[str, dict[str, grpc.aio.Channel]] = {}  # by address, then by epoch, oldest first
        self._closing: set[asyncio.Task[None]] = set()

    def stub(self, address: str, epoch: str) -> Any:
        """A Worker stub for the process ``epoch`` at ``host:port``."""
        channels = self._channels.setdefault(address, {})
        if epoch not in channels:
            channels[epoch] = channel(address, self._secret)
            while len(channels) > EPOCHS_KEPT:
                self._close_later(channels.pop(next(iter(channels))))
        return worker_pb2_grpc.WorkerStub(channels[epoch])  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        for channels in self._channels.values():
            for open_channel in channels.values():
                await open_channel.close(None)
        self._channels.clear()
        await asyncio.gather(*self._closing)

    def _close_later(self, old: grpc.aio.Channel) -> None:
        task = asyncio.create_task(old.close(None), name="close-channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
