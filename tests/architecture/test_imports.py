"""The arrows between packages hold, and the tools that watch them do see a wrong one."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "kvstore")

WRONG_IMPORTS = {
    "Arrows point down in services": ("services/telemetry/logs.py", "import services.engine.messages"),
    "Arrows point down in kvstore": ("kvstore/blocks.py", "import kvstore.pool"),
    "kvstore knows no service": ("kvstore/errors.py", "import services.config"),
    "The router never imports the engine": ("services/router/types.py", "import services.engine.messages"),
    "The router never imports torch or transformers, by whatever way": ("services/router/types.py", "import torch"),
    "What crosses a process needs neither torch nor Ray": ("services/protocol/model_card.py", "import transformers"),
    "Ray only in app and deployments": ("services/worker/core.py", "import ray"),
}
"""Contract → a file and an import there that breaks it."""

PURE = (
    "kvstore/plan.py",
    "kvstore/blocks.py",
    "kvstore/geometry.py",
    "kvstore/pool.py",
    "kvstore/prefix.py",
    "kvstore/runs.py",
    "kvstore/transfer/plan.py",
    "services/engine/scheduler.py",
    "services/engine/budget.py",
    "services/router/bookings.py",
    "services/router/policy.py",
    "services/router/policy_cost.py",
    "services/router/policy_rivals.py",
    "services/router/loads.py",
    "services/replay/prefill.py",
    "services/replay/decode.py",
    "services/start/shares.py",
)
"""Policies: a snapshot in, a choice out. Those that exist are checked; the four of the design must exist."""
MUST_BE_PURE = {
    "kvstore/pool.py",
    "kvstore/transfer/plan.py",
    "services/engine/scheduler.py",
    "services/router/policy.py",
}
IMPURE = {
    "asyncio", "concurrent", "datetime", "grpc", "logging", "multiprocessing", "random", "ray", "redis", "requests",
    "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch", "urllib", "uuid",
}  # fmt: skip

LIGHT = {
    "services.router.main": {"torch", "transformers", "ray", "services.engine", "services.worker"},
    "services.router.serve": {"torch", "transformers", "ray", "services.engine", "services.worker"},
    "services.router.deployment": {"torch", "transformers", "services.engine", "services.worker"},
    "services.launch": {"torch", "transformers", "ray"},
    "services.prefill.worker": {"torch", "transformers", "ray"},
    "services.decode.worker": {"torch", "transformers", "ray"},
    "kvstore.transfer.process": {"torch", "transformers", "ray", "services"},
}
"""Module → what its process must not hold after importing it."""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run([*command, "--no-cache"], cwd=folder, capture_output=True, text=True)


def copied(folder: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def contracts() -> set[str]:
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["name"] for contract in data["tool"]["importlinter"]["contracts"]}


def test_every_arrow_holds_in_the_project_itself() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(contracts())} kept, 0 broken" in done.stdout


def test_every_contract_has_a_wrong_import_here() -> None:
    assert set(WRONG_IMPORTS) == contracts()


def test_a_wrong_import_breaks_its_contract(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for file, line in WRONG_IMPORTS.values():
        path = folder / file
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    done = lint(folder)
    assert done.returncode != 0
    kept = [name for name in WRONG_IMPORTS if f"{name} BROKEN" not in done.stdout]
    assert not kept, done.stdout


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("name", [name for name in PURE if name in MUST_BE_PURE or (ROOT / name).exists()])
def test_a_policy_does_no_io_and_takes_clock_and_randomness_as_arguments(name: str) -> None:
    assert imported(ROOT / name) & IMPURE == set()


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_a_process_holds_only_what_it_needs(module: str) -> None:
    script = (
        f"import importlib, sys\nimportlib.import_module({module!r})\n"
        f"heavy = [name for name in {sorted(LIGHT[module])!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
