"""Transports whose channel cannot be closed, as Mooncake's with a thread inside, or raises what no transport may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.transfer.base import ChannelStuck, Peer, Region, Write, WriteState
from kvstore.transfer.local import LocalListener
from kvstore.transfer.options import TransportOptions


class StuckChannel:
    def submit(self, writes: Sequence[Write]) -> list[int]:
        return list(range(len(writes)))

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        return dict.fromkeys(ids, WriteState.PENDING)

    def close(self) -> None:
        raise ChannelStuck("a thread does not return")


class BrokenChannel(StuckChannel):
    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        raise ZeroDivisionError("a bug of the transport")


class StuckTransport:
    name = "stuck"

    def __init__(self, options: TransportOptions) -> None:
        pass

    def listen(self, region: Region, peer: Peer) -> LocalListener:
        return LocalListener(region, peer)

    def connect(self, region: Region, peer: Peer, segment: str) -> StuckChannel:
        return StuckChannel()


class BrokenTransport(StuckTransport):
    name = "broken"

    def connect(self, region: Region, peer: Peer, segment: str) -> StuckChannel:
        return BrokenChannel()
