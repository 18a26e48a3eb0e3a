"""Whether this machine can run pdray at all, decided from facts that are given, so that each refusal has a test."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import sys
from dataclasses import dataclass

from kvstore.transfer.devices import NO_NVLINK, why_no_rdma
from services.transfer_config import TransferConfig

MOONCAKE_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
"""Shared library → Debian's package. Mooncake's module does not import without them, whatever its wire."""
INSTALL = "pip install 'pdray[mooncake]'"
WAYS_OUT = "--transport tcp needs none of it, --allow-fallback goes on with what works and says so"
CONTAINER = "run it in a Linux container with Python 3.11 or 3.12"


class StartError(Exception):
    """pdray cannot start here. The message says why, and ends with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The facts a start depends on."""

    os_name: str  # platform.system()
    python: tuple[int, int]
    machine: str  # x86_64, aarch64
    missing_libraries: tuple[str, ...]  # of MOONCAKE_LIBRARIES
    has_mooncake: bool  # its Python package is installed
    no_rdma: str = ""  # why RDMA cannot work here; empty where it may


def this_system(rdma_devices: str = "") -> System:
    """The facts of the machine and interpreter this runs on. ``rdma_devices``: those that are to be used."""
    return System(
        os_name=platform.system(),
        python=sys.version_info[:2],
        machine=platform.machine(),
        missing_libraries=tuple(name for name in MOONCAKE_LIBRARIES if not _loads(name)),
        has_mooncake=importlib.util.find_spec("mooncake") is not None,
        no_rdma=why_no_rdma(rdma_devices),
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def apt_command(libraries: tuple[str, ...]) -> str:
    """The command that installs these shared libraries on Debian and Ubuntu."""
    return "apt-get install -y " + " ".join(MOONCAKE_LIBRARIES[name] for name in libraries)


def refusal(system: System, transport: str) -> str:
    """Why pdray cannot start with this transport here, and the way out; empty where it can.

    ``auto`` never needs more than tcp.
    """
    if system.os_name != "Linux":
        return f"pdray needs Linux (memfd, parent-death signals), this is {system.os_name}: {CONTAINER}"
    if not (3, 11) <= system.python < (3, 13):
        version = ".".join(map(str, system.python))
        return f"pdray needs Python 3.11 or 3.12, this is {version}: make a new environment, or {CONTAINER}"
    return f"{reason}; {WAYS_OUT}" if (reason := _no_transport(system, transport)) else ""


def _no_transport(system: System, transport: str) -> str:
    if transport == "nvlink":
        return f"transport nvlink cannot be used: {NO_NVLINK}"
    if transport not in ("rdma", "mooncake"):
        return ""
    if transport == "rdma" and system.no_rdma:
        return f"transport rdma cannot be used: {system.no_rdma}"
    if not system.has_mooncake:
        return f"transport {transport} needs mooncake, which is not installed (machine {system.machine}): {INSTALL}"
    if system.missing_libraries:
        command = apt_command(system.missing_libraries)
        return f"transport {transport} needs {', '.join(system.missing_libraries)}: {command} (as root), or {CONTAINER}"
    return ""


def check_system(config: TransferConfig) -> None:
    """Raise StartError where this machine cannot run pdray with the transport that is asked for."""
    transport = "auto" if config.allow_fallback else config.wanted
    if reason := refusal(this_system(config.device), transport):
        raise StartError(reason)
