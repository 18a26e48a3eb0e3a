"""Whether this machine can run pdray at all, decided from facts that are given, so that each refusal has a test."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import sys
from dataclasses import dataclass

MOONCAKE_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
"""Shared library → Debian's package. Mooncake's module does not import without them, whatever its wire."""
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


def this_system() -> System:
    """The facts of the machine and interpreter this runs on."""
    return System(
        os_name=platform.system(),
        python=sys.version_info[:2],
        machine=platform.machine(),
        missing_libraries=tuple(name for name in MOONCAKE_LIBRARIES if not _loads(name)),
        has_mooncake=importlib.util.find_spec("mooncake") is not None,
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

    ``auto`` never needs Mooncake: it falls back to tcp.
    """
    if system.os_name != "Linux":
        return f"pdray needs Linux (memfd, parent-death signals), this is {system.os_name}: {CONTAINER}"
    if not (3, 11) <= system.python < (3, 13):
        version = ".".join(map(str, system.python))
        return f"pdray needs Python 3.11 or 3.12, this is {version}: make a new environment, or {CONTAINER}"
    if transport != "mooncake":
        return ""
    if not system.has_mooncake:
        return (
            f"transport mooncake is not installed (machine {system.machine}): "
            "pip install 'pdray[mooncake]', or start with --transport tcp"
        )
    if system.missing_libraries:
        return (
            f"transport mooncake needs {', '.join(system.missing_libraries)}: {apt_command(system.missing_libraries)} "
            f"(as root), or start with --transport tcp, or {CONTAINER}"
        )
    return ""


def check_system(transport: str) -> None:
    """Raise StartError where this machine cannot run pdray with this transport."""
    if reason := refusal(this_system(), transport):
        raise StartError(reason)
