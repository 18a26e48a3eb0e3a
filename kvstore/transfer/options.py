"""How a transport is found by name, and what it is told when it is built."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field

from kvstore.errors import TransportUnavailable
from kvstore.transfer.base import Transport
from kvstore.transfer.devices import NO_NVLINK, rdma_devices

BUILT_IN = {
    "local": "kvstore.transfer.local:LocalTransport",
    "tcp": "kvstore.transfer.tcp:TcpTransport",
    "mooncake": "kvstore.transfer.mooncake:MooncakeTransport",
    "rdma": "kvstore.transfer.rdma:RdmaTransport",
}
ORDER = ("nvlink", "rdma", "mooncake", "tcp")
"""The fastest first. mooncake is its TCP wire, tcp needs nothing beside a secret."""
WAYS_OUT = "--allow-fallback goes on with a slower one and says so, --transport names another"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What every transport gets; one ignores what it has no use for."""

    host: str = "127.0.0.1"  # address that listeners bind and segments name
    secret: str = field(default="", repr=False)  # shared by all workers of an application, never sent
    protocol: str = "tcp"  # of Mooncake
    device: str = ""  # of Mooncake
    max_outstanding: int = 512  # writes that are submitted to one peer at most


def load_transport(name: str, options: TransportOptions, *, allow_fallback: bool = False) -> tuple[Transport, str]:
    """The transport of that name, ready to listen and connect, and a note where there is something to say about it.

    A transport that was asked for by name is never replaced, but with ``allow_fallback``, and then the note says so.

    Args:
        name: one of `ORDER`, ``local``, ``auto`` (the first of `ORDER` that runs here and has run on hardware), or
            ``module:Class``, where the class takes the options and has a method ``check`` or none.
        allow_fallback: go on with the next one of `ORDER` where this one cannot run here.
    Raises:
        TransportUnavailable: it is unknown, or cannot run here; the message says what is missing.
    """
    if name == "auto":
        return _load_any(options)
    try:
        return _load(name, options), ""
    except TransportUnavailable as exc:
        if name not in ORDER[:-1]:
            raise
        if not allow_fallback:
            raise TransportUnavailable(f"transport {name} cannot be used: {exc}; {WAYS_OUT}") from None
        reasons = [f"{name}: {exc}"]
    for other in ORDER[ORDER.index(name) + 1 :]:
        try:
            return _load(other, options), f"{other} instead of {name} (--allow-fallback): {'; '.join(reasons)}"
        except TransportUnavailable as exc:
            reasons.append(f"{other}: {exc}")
    raise TransportUnavailable(f"neither {name} nor what is slower can be used: {'; '.join(reasons)}")


def load_spares(name: str, chosen: str, options: TransportOptions, *, allow_fallback: bool) -> list[Transport]:
    """What runs beside the chosen transport, for peers that do not have it: tcp, unless one was asked for by name."""
    if chosen not in ORDER[:-1] or not (name == "auto" or allow_fallback):
        return []
    with contextlib.suppress(TransportUnavailable):
        return [_load("tcp", options)]
    return []


def _load_any(options: TransportOptions) -> tuple[Transport, str]:
    try:
        chosen = _load("mooncake", options)
    except TransportUnavailable as exc:
        return _load("tcp", options), f"tcp, since mooncake cannot be used: {exc}"
    unused = [name for name, is_up in rdma_devices().items() if is_up]
    note = f"RDMA devices {', '.join(unused)} are not used: rdma has not run on hardware, --transport rdma tries it"
    return chosen, note if unused else ""


def _load(name: str, options: TransportOptions) -> Transport:
    if name == "nvlink":
        raise TransportUnavailable(NO_NVLINK)
    target = BUILT_IN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        known = ", ".join(sorted({*BUILT_IN, *ORDER}))
        raise TransportUnavailable(f"transport {name!r} is none of {known}, auto or module:Class")
    try:
        transport_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as exc:
        raise TransportUnavailable(f"transport {name!r} cannot be loaded: {exc}") from None
    transport: Transport = transport_class(options)
    check = getattr(transport, "check", None)
    if check is not None:
        check()
    return transport
