"""Mooncake over RDMA, under a name of its own: workers whose wires differ do not take each other for equal.

It has not run on hardware; only who asks for it by name gets it.
"""

from __future__ import annotations

import dataclasses

from kvstore.errors import TransportUnavailable
from kvstore.transfer.devices import why_no_rdma
from kvstore.transfer.mooncake import MooncakeTransport
from kvstore.transfer.options import TransportOptions


class RdmaTransport(MooncakeTransport):
    name = "rdma"

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(dataclasses.replace(options, protocol="rdma"))
        self._device = options.device

    def check(self) -> None:
        """Raises TransportUnavailable where no RDMA port is up, or where mooncake itself cannot be used."""
        if reason := why_no_rdma(self._device):
            raise TransportUnavailable(reason)
        super().check()
