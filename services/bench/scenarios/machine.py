"""Where figures were taken: processor, cores, memory, and the commit of the code."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

KERNEL_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
_CPUINFO = Path("/proc/cpuinfo")
_GIB = 1 << 30


def hardware() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = known.get("flags", "").split()
    return {
        "cpu": known.get("model name") or platform.processor() or platform.machine(),
        "cores": len(psutil.Process().cpu_affinity() or ()) or psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "instructions": [flag for flag in KERNEL_FLAGS if flag in flags],
        "python": platform.python_version(),
    }


def commit() -> str:
    """Of the checkout this runs from, with ``+`` where files have changed since; "" where it is none."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
