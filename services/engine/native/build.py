"""The native kernels as a shared library: compiled once for each machine's instructions, kept, and loaded.

    detect ─► find a library of the same sources, flags and compiler ─► else compile ─► load

A library lies in ``$PDRAY_HOME/kernels`` (``~/.cache/pdray/kernels``) under a digest of all that it is made from. An
image may bring it along: ``python -m services.engine.native.build`` compiles for every kind of CPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from services.config import home

SOURCES = Path(__file__).parent
_COMMON = ("-std=c++20", "-O3", "-fno-math-errno", "-pthread", "-shared", "-fPIC", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_TIMEOUT_S = 300.0


class NoKernels(RuntimeError):
    """The kernels cannot run here; says why, and what would help."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """A kind of CPU that the kernels are compiled for."""

    name: str
    cpu_flags: frozenset[str]  # as /proc/cpuinfo has them
    compiler_flags: tuple[str, ...]


KINDS = (
    Instructions(
        "amx",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile", "amx_bf16"}),
        (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    Instructions(
        "avx512_bf16",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
        (*_AVX512, "-mavx512bf16"),
    ),
    Instructions(
        "avx512",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        _AVX512,
    ),
    Instructions("avx2", frozenset({"avx2", "fma"}), ("-mavx2",)),
)
"""Best first."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the kernel says that the CPU can; empty where it does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return frozenset(found)


def choose(kernels: str, flags: frozenset[str]) -> Instructions:
    """The best kind that the CPU has, or the one that was asked for by name.

    Raises:
        NoKernels: there is none.
    """
    able = [kind for kind in KINDS if kind.cpu_flags <= flags]
    if kernels == "auto":
        if not able:
            raise NoKernels("this CPU has neither AVX-512 nor AVX2 with FMA")
        return able[0]
    chosen = next((kind for kind in able if kind.name == kernels), None)
    if chosen is None:
        known = ", ".join(kind.name for kind in able) or "none"
        raise NoKernels(f"this CPU has no {kernels}; it can run: {known} (engine.kernels)")
    return chosen


def library_for(kind: Instructions, folder: Path | None = None) -> Path:
    """The compiled library, made if it is not there yet.

    Raises:
        NoKernels: no compiler, or it failed; the message has its first error.
    """
    for place in (folder or home() / "kernels", SOURCES / "built"):
        path = place / f"pdray-{kind.name}-{_digest(kind)}.so"
        if path.is_file():
            return path
    compiler = find_compiler()
    if compiler is None:
        raise NoKernels("there is no C++ compiler (apt-get install g++)")
    path = (folder or home() / "kernels") / f"pdray-{kind.name}-{_digest(kind)}.so"
    try:
        _compile(compiler, kind, path)
    except OSError as exc:
        raise NoKernels(f"the kernels could not be compiled into {path.parent}: {exc} (PDRAY_HOME)") from None
    return path


def find_compiler() -> str | None:
    """The path of a C++ compiler."""
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def _digest(kind: Instructions) -> str:
    state = blake2b(digest_size=8)
    for part in (*_COMMON, *kind.compiler_flags):
        state.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[hc]*")):
        if source.suffix in (".h", ".cpp"):
            state.update(source.name.encode() + b"\0" + source.read_bytes())
    return state.hexdigest()


def _compile(compiler: str, kind: Instructions, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *_COMMON, *kind.compiler_flags, str(SOURCES / "kernels.cpp"), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise NoKernels(f"{compiler} could not compile the kernels: {exc}") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise NoKernels(f"{compiler} could not compile the kernels: {(errors or ['no message'])[0]}")
        made.replace(path)  # at once, so that a worker that starts at the same time never sees half a file


def main(arguments: list[str]) -> int:
    """Compile for this CPU, or with ``--all`` for every kind; ``--in-place`` beside the sources."""
    try:
        kinds = KINDS if "--all" in arguments else (choose("auto", cpu_flags()),)
        for kind in kinds:
            path = library_for(kind, SOURCES / "built" if "--in-place" in arguments else None)
            sys.stdout.write(f"kernels for {kind.name}: {path}\n")
    except NoKernels as exc:
        sys.stderr.write(f"no native kernels: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
