"""Rules that no linter knows: what the code may call, how long it may be, and that the project's own words are true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 320  # the rule is 300; a little more is no reason to split
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

LONG_FILES = {"services/config.py": 400}  # one dataclass for each section, each field with its sentence
WIDE_FUNCTIONS = {
    "services/cli.py:serve",  # typer: one parameter for each option
    "services/cli.py:prepare",
    "services/cli.py:replay",
    "services/engine/child.py:child_config",  # keyword-only: the fields of one message
}

ENVIRONMENT_READERS = {
    "services/config.py",  # the one place that reads settings from it
    "kvstore/process.py",  # hands it on to a child, unread
}
DATA_TO_CODE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


@cache
def sources() -> dict[str, str]:
    """Our own Python code by its path; generated stubs are none of ours."""
    files = [file for name in ("services", "kvstore") for file in sorted((ROOT / name).rglob("*.py"))]
    return {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files if "_pb2" not in file.name
    }


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sources().items()}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def calls() -> Iterator[tuple[str, str]]:
    """(file, dotted name) of everything that is called or named."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name):
                yield name, ast.unparse(node)


def modules() -> Iterator[tuple[str, str]]:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield name, node.module


def test_there_is_code_to_look_at() -> None:
    assert len(sources()) > 50
    assert "services/router/deployment.py" in sources()


def test_nothing_turns_received_bytes_into_code() -> None:
    assert [(file, name) for file, name in modules() if name.partition(".")[0] in DATA_TO_CODE] == []
    forbidden = {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "numpy.load", "np.load"}
    assert [(file, name) for file, name in calls() if name in forbidden] == []


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {file for file, name in calls() if name in ("os.environ", "os.getenv", "os.environb")}
    assert readers <= ENVIRONMENT_READERS
    assert not [file for file, name in modules() if name == "os.environ"]


def test_files_stay_short_enough_to_read() -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    assert {n: lines for n, lines in lengths.items() if lines > LONG_FILES.get(n, MAX_FILE_LINES)} == {}


def test_functions_stay_short_enough_to_read() -> None:
    lengths = {f"{name}:{f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for name, f in functions()}
    wide = {name for name in lengths if name in WIDE_FUNCTIONS}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES and name not in wide} == {}


def test_functions_take_few_parameters() -> None:
    counts: dict[str, int] = {}
    for name, f in functions():
        names = [a.arg for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs] if a.arg not in ("self", "cls")]
        counts[f"{name}:{f.name}"] = len(names)
    assert {n: k for n, k in counts.items() if k > MAX_PARAMETERS and n not in WIDE_FUNCTIONS} == {}


def test_every_module_says_what_it_is() -> None:
    spoken = {name: tree for name, tree in trees().items() if tree.body and not name.endswith("__main__.py")}
    silent = [name for name, tree in spoken.items() if not ast.get_docstring(tree)]
    assert silent == []


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip("git is missing, or this is no checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_the_host_of_a_package_registry() -> None:
    pairs = [("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("npmjs", "org"), ("debian", "org")]
    pattern = re.compile("|".join(re.escape(".".join(pair)) for pair in pairs))
    found = []
    for file in tracked():
        text = file.read_bytes().decode("utf-8", errors="ignore")
        if pattern.search(text):
            found.append(file.relative_to(ROOT).as_posix())
    assert found == []


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    extras = project()["project"]["optional-dependencies"]
    lines = [
        *project()["project"]["dependencies"],
        *(line for name in extras if name != "mooncake-cuda" for line in extras[name]),
    ]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_direct_dependency_is_pinned_to_a_version_it_allows(requirement: Requirement) -> None:
    version = pins()[canonical(requirement.name)]
    assert requirement.specifier.contains(version)


def test_the_tested_versions_are_the_pinned_ones() -> None:
    installed = {}
    for requirement in requirements():
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue  # an extra that this environment does without
        installed[canonical(requirement.name)] = version.partition("+")[0]
    assert installed == {name: pins()[name] for name in installed}


def readme_commands() -> list[str]:
    """Lines of the README's shell blocks, without their prompts."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.DOTALL)
    return [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines() if line.strip()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_every_command_of_the_readme_exists() -> None:
    from services.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for line in readme_commands():
        words = line.split()
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word and not word.startswith(("-", '"'))]
            assert set(targets[:1]) <= make_targets(), line
        elif words[0].endswith("pdray"):
            assert words[1] in known or words[1].startswith("-"), line


def test_every_make_target_is_explained_and_phony() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    explained = set(re.findall(r"^([a-z-]+):.*## ", text, flags=re.MULTILINE))
    phony = set(re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)[0].split())
    assert make_targets() == explained == phony
    assert {"setup", "run", "test", "test-all", "check", "lint", "bench", "proto", "clean", "help"} <= phony


@pytest.mark.parametrize("name", [".ci/run", ".ci/setup.sh"])
def test_scripts_stop_at_the_first_error_and_may_be_run(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert re.search(r"^set -eu", text, flags=re.MULTILINE)
    assert os.access(ROOT / name, os.X_OK)
    assert subprocess.run(["bash", "-n", ROOT / name]).returncode == 0
