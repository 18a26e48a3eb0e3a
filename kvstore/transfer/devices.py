"""What this machine has for moving KV beside its network: RDMA devices, and why something faster is not there."""

from __future__ import annotations

from pathlib import Path

RDMA_CLASS = Path("/sys/class/infiniband")
NO_NVLINK = "KV lies in host memory in this build, which nvlink and CUDA IPC do not reach"


def rdma_devices(root: Path = RDMA_CLASS) -> dict[str, bool]:
    """Names of the kernel's RDMA devices; True where a port of it is active."""
    if not root.is_dir():
        return {}
    return {entry.name: any(map(_is_active, entry.glob("ports/*/state"))) for entry in sorted(root.iterdir())}


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text(encoding="utf-8")
    except OSError:
        return False


def why_no_rdma(wanted: str, root: Path = RDMA_CLASS) -> str:
    """Why RDMA over these devices cannot work here; empty where it may.

    Args:
        wanted: names, comma separated; empty: any device will do.
    """
    devices = rdma_devices(root)
    if not devices:
        return f"this machine has no RDMA device ({root} lists none)"
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if absent := [name for name in names if name not in devices]:
        return f"there is no RDMA device {', '.join(absent)} (transfer.device), only {', '.join(devices)}"
    looked_at = names or list(devices)
    if not any(devices[name] for name in looked_at):
        return f"no port of {', '.join(looked_at)} is active"
    return ""
