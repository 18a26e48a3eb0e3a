"""How a transport is found by name, and what it is told when it is built."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from kvstore.errors import TransportUnavailable
from kvstore.transfer.base import Transport

BUILT_IN = {
    "local": "kvstore.transfer.local:LocalTransport",
    "tcp": "kvstore.transfer.tcp:TcpTransport",
    "mooncake": "kvstore.transfer.mooncake:MooncakeTransport",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What every transport gets; one ignores what it has no use for."""

    host: str = "127.0.0.1"  # address that listeners bind and segments name
    secret: str = field(default="", repr=False)  # shared by all workers of an application, never sent
    protocol: str = "tcp"  # of Mooncake
    device: str = ""  # of Mooncake
    max_outstanding: int = 512  # writes that are submitted to one peer at most


def load_transport(name: str, options: TransportOptions) -> tuple[Transport, str]:
    """The transport of that name, ready to listen and connect, and a note where another one was taken ("auto").

    Args:
        name: ``local``, ``tcp``, ``mooncake``, ``auto`` (mooncake where it runs and can be guarded, else tcp), or
            ``module:Class``, where the class takes the options and has a method ``check`` or none.
    Raises:
        TransportUnavailable: it is unknown, or cannot run here; the message says what is missing.
    """
    if name == "auto":
        try:
            return load_transport("mooncake", options)
        except TransportUnavailable as exc:
            return load_transport("tcp", options)[0], f"tcp, since mooncake cannot be used: {exc}"
    target = BUILT_IN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        raise TransportUnavailable(f"transport {name!r} is none of {', '.join(sorted(BUILT_IN))}, auto or module:Class")
    try:
        transport_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as exc:
        raise TransportUnavailable(f"transport {name!r} cannot be loaded: {exc}") from None
    transport: Transport = transport_class(options)
    check = getattr(transport, "check", None)
    if check is not None:
        check()
    return transport, ""
