"""Whether Mooncake runs here and can be guarded, and which RDMA devices there are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvstore.transfer.devices import NO_NVLINK, RDMA_CLASS, rdma_devices, why_no_rdma
from kvstore.transfer.options import ORDER
from services.config import ServeConfig, TransferConfig
from services.doctor.checks import Check, Level
from services.start.system import apt_command, this_system

PROBE_LIMIT_S = 30.0
# Loading the transport imports Mooncake's native module, which may end the process: so in one of its own.
_PROBE = """
import sys
from kvstore.errors import TransportUnavailable
from kvstore.transfer.options import TransportOptions, load_transport
try:
    load_transport(sys.argv[1], TransportOptions(secret="doctor"))
except TransportUnavailable as exc:
    sys.exit(str(exc))
"""


def check_mooncake(config: ServeConfig) -> list[Check]:
    """Load the transport as a worker's transfer process does, with its guard."""
    system = this_system()
    needed = config.transfer.wanted in ("mooncake", "rdma") and not config.transfer.allow_fallback
    bad: Level = "error" if needed else "warning"
    if not system.has_mooncake:
        fix = "make setup, or pip install 'pdray[mooncake]'; --transport tcp needs neither"
        return [Check("mooncake", bad, "not installed: KV moves over tcp", fix)]
    if system.missing_libraries:
        return [
            Check(
                "mooncake", bad, "its libraries are missing: KV moves over tcp", apt_command(system.missing_libraries)
            )
        ]
    reason = probe("mooncake")
    if reason:
        return [
            Check("mooncake", bad, f"cannot be used, KV moves over tcp: {reason}", "--transport tcp says so outright")
        ]
    return [Check("mooncake", "ok", "imports, and its sockets can be guarded")]


def probe(transport: str) -> str:
    """Why this transport cannot run here; empty where it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, transport], capture_output=True, text=True, timeout=PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"it did not load within {PROBE_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"loading it ended with status {done.returncode}"


def check_rdma(config: ServeConfig, devices: Path = RDMA_CLASS) -> list[Check]:
    """What the kernel lists under /sys/class/infiniband, and whether RDMA can use it."""
    found, reason = rdma_devices(devices), why_no_rdma(config.transfer.device, devices)
    names = ", ".join(found) or "none"
    if config.transfer.wanted == "rdma":
        if not reason:
            return [Check("rdma", "ok", f"devices: {names}; it has not run on hardware before")]
        level: Level = "warning" if config.transfer.allow_fallback else "error"
        return [Check("rdma", level, f"rdma was asked for: {reason}", "--transport auto, or --allow-fallback")]
    if reason:
        return [Check("rdma", "note", f"not used: {reason}")]
    return [Check("rdma", "note", f"devices: {names}, not used by auto", "--transport rdma uses them")]


def check_transports(config: ServeConfig, devices: Path = RDMA_CLASS) -> list[Check]:
    """What each transport would do here, and which one the pairs of this machine would get."""
    mooncake, rdma = check_mooncake(config), check_rdma(config, devices)
    works = mooncake[0].level == "ok"
    bad = {"nvlink": NO_NVLINK, "rdma": why_no_rdma(config.transfer.device, devices)}
    bad["mooncake"] = "" if works else mooncake[0].finding
    bad["rdma"] = bad["rdma"] or bad["mooncake"]
    return [*mooncake, *rdma, _choice(config.transfer, bad)]


def _choice(transfer: TransferConfig, bad: Mapping[str, str]) -> Check:
    wanted = transfer.wanted
    if wanted not in ("auto", *ORDER):
        return Check("transport", "note", f"{wanted}, whatever this machine has")
    if wanted == "auto":
        taken = "tcp" if bad["mooncake"] else "mooncake"
        reasons = [f"{name}: {reason}" for name, reason in bad.items() if reason]
        return Check("transport", "ok", f"auto means {taken} here" + (f" ({'; '.join(reasons)})" if reasons else ""))
    reason = bad.get(wanted, "")
    if not reason:
        return Check("transport", "ok", f"{wanted}, as asked")
    slower = next(name for name in ORDER[ORDER.index(wanted) + 1 :] if not bad.get(name))
    if transfer.allow_fallback:
        return Check("transport", "warning", f"{slower} instead of {wanted}: {reason}", f"--transport {slower}")
    return Check("transport", "error", f"{wanted} cannot be used: {reason}", f"--transport {slower}, --allow-fallback")
