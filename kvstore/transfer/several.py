"""The transports of one transfer process: the one it was started with, and slower ones for peers that lack it.

A pair uses the first of the writer's list that the reader has (`first_common`). The reader opens its listener with that
one, and the segment tells the writer which it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from kvstore.errors import TransferError
from kvstore.transfer.base import Channel, Listener, Peer, Region, Transport


def first_common(writer: Sequence[str], reader: Sequence[str]) -> str:
    """The transport of a pair, the writer's order counts; empty where they have none in common."""
    return next((name for name in writer if name in reader), "")


class Several:
    """All of them as one; the first is what it is called by, and what a listener gets that names none."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self.name = transports[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._transports)

    def named(self, name: str) -> Transport:
        """Raises TransferError for one that does not run here."""
        if (name or self.name) not in self._transports:
            raise TransferError(f"transport {name!r} does not run here, only {', '.join(self._transports)}")
        return self._transports[name or self.name]

    def listen(self, region: Region, peer: Peer) -> Listener:
        return self._transports[self.name].listen(region, peer)

    def connect(self, region: Region, peer: Peer, segment: str) -> Channel:
        return self.named(self._of_segment(segment)).connect(region, peer, segment)

    def _of_segment(self, segment: str) -> str:
        if len(self._transports) > 1:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return str(json.loads(segment)["transport"])
        return self.name
