"""A transport that goes wrong on purpose, around any other one.

    pdray serve --transport tests.faults.transport:FaultyTcp      with transfer.device: the path of the faults' file

Faults are deterministic by the file's seed and the order of writes. Without a path, or with no rule in the file, it is
the inner transport and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvstore.errors import TransferError
from kvstore.transfer.base import Listener, Peer, Region, Transport
from kvstore.transfer.local import LocalTransport
from kvstore.transfer.mooncake import MooncakeTransport
from kvstore.transfer.options import TransportOptions
from kvstore.transfer.tcp import TcpTransport
from tests.faults import wire
from tests.faults.channel import FaultyChannel
from tests.faults.control import Control


class FaultyListener:
    """The inner listener, and beside it a way for packets that left a closed channel."""

    def __init__(self, inner: Listener, region: Region, control: Control) -> None:
        self._inner = inner
        self._control = control
        self._landing = None if control.path is None else wire.Landing(control, region, inner.segment)

    @property
    def segment(self) -> str:
        return self._inner.segment

    def allow(self, ticket_id: str) -> None:
        if self._landing is not None:
            self._landing.allow(ticket_id)
        self._inner.allow(ticket_id)

    def revoke(self, ticket_id: str) -> bool:
        fenced = self._inner.revoke(ticket_id)
        if self._landing is not None:
            self._landing.revoke(ticket_id)
        return fenced and self._control.rules().first("unfenced") is None

    def close(self) -> None:
        if self._landing is not None:
            self._landing.close()
            self._landing = None
        self._inner.close()


class Faulty:
    """Subclasses name the inner transport."""

    name: ClassVar[str]
    inner: ClassVar[type[Transport]]

    def __init__(self, options: TransportOptions) -> None:
        self._control = Control(options.device)
        self._inner = self.inner(replace(options, device=""))  # type: ignore[call-arg]

    def check(self) -> None:
        check = getattr(self._inner, "check", None)
        if check is not None:
            check()

    def listen(self, region: Region, peer: Peer) -> FaultyListener:
        return FaultyListener(self._inner.listen(region, peer), region, self._control)

    def connect(self, region: Region, peer: Peer, segment: str) -> FaultyChannel:
        if self._control.rules().first("fail_connect"):
            self._control.note("fail_connect", peer=peer.worker_id)
            raise TransferError("injected: the reader cannot be reached")
        instance = "" if self._control.path is None else wire.instance_of(self._control, segment)
        return FaultyChannel(self._inner.connect(region, peer, segment), region, self._control, instance)


class FaultyLocal(Faulty):
    name = "faulty-local"
    inner = LocalTransport


class FaultyTcp(Faulty):
    name = "faulty-tcp"
    inner = TcpTransport


class FaultyMooncake(Faulty):
    name = "faulty-mooncake"
    inner = MooncakeTransport
