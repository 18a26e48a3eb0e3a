"""Channels to other workers, one for each address, opened at first use and closed with the worker."""

from __future__ import annotations

from typing import Any

import grpc.aio

from services.protocol.auth import channel
from services.protocol.proto import worker_pb2_grpc


class Peers:
    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, address: str) -> Any:
        """A Worker stub for ``host:port``."""
        if address not in self._channels:
            self._channels[address] = channel(address, self._secret)
        return worker_pb2_grpc.WorkerStub(self._channels[address])  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        for open_channel in self._channels.values():
            await open_channel.close(None)
        self._channels.clear()
