"""Whether Mooncake runs here and can be guarded, and which RDMA devices there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.config import ServeConfig
from services.doctor.checks import Check, Level
from services.start.system import apt_command, this_system

PROBE_LIMIT_S = 30.0
_RDMA_CLASS = Path("/sys/class/infiniband")
# Loading the transport imports Mooncake's native module, which may end the process: so in one of its own.
_PROBE = """
import sys
from kvstore.errors import TransportUnavailable
from kvstore.transfer.options import TransportOptions, load_transport
try:
    load_transport(sys.argv[1], TransportOptions(secret="doctor", protocol=sys.argv[2]))
except TransportUnavailable as exc:
    sys.exit(str(exc))
"""


def check_mooncake(config: ServeConfig) -> list[Check]:
    """Load the transport as a worker's transfer process does, with its guard."""
    system = this_system()
    needed = config.transfer.transport == "mooncake"
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
    reason = probe("mooncake", config.transfer.protocol)
    if reason:
        return [
            Check("mooncake", bad, f"cannot be used, KV moves over tcp: {reason}", "--transport tcp says so outright")
        ]
    return [Check("mooncake", "ok", f"imports, and its sockets can be guarded (wire {config.transfer.protocol})")]


def probe(transport: str, protocol: str) -> str:
    """Why this transport cannot run here; empty where it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, transport, protocol], capture_output=True, text=True, timeout=PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"it did not load within {PROBE_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"loading it ended with status {done.returncode}"


def check_rdma(config: ServeConfig, devices: Path = _RDMA_CLASS) -> list[Check]:
    """What the kernel lists under /sys/class/infiniband."""
    names = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    if names:
        fix = "" if config.transfer.protocol == "rdma" else "--set transfer.protocol=rdma uses them"
        return [Check("rdma", "ok" if not fix else "note", f"devices: {', '.join(names)}", fix)]
    if config.transfer.protocol == "rdma":
        return [
            Check("rdma", "error", "transfer.protocol is rdma, and there is no device", "--set transfer.protocol=tcp")
        ]
    return [Check("rdma", "note", "no RDMA device: Mooncake's wire is TCP")]
