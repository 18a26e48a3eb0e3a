"""The image and the composition, read as far as that goes without a container engine."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from services.cli import app
from services.start.system import MOONCAKE_LIBRARIES

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
INSTRUCTIONS = {
    *("FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "LABEL", "USER"),
    *("VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
}


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str
    stage: str


def instructions() -> list[Instruction]:
    text = "\n".join(line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if line[:1] != "#")
    found, stage = [], ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.split(" AS ")[1]
        found.append(Instruction(word, rest.strip(), stage))
    return found


def of(word: str, stage: str = "") -> list[str]:
    return [i.rest for i in instructions() if i.word == word and stage in ("", i.stage)]


def test_the_file_has_known_instructions_and_shell_that_parses() -> None:
    assert {i.word for i in instructions()} <= INSTRUCTIONS
    for command in of("RUN"):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_base_is_an_argument_and_only_the_last_stage_ships() -> None:
    assert instructions()[0].word == "ARG"
    assert instructions()[0].rest.startswith("BASE=python:3.11-")
    assert of("FROM") == ["${BASE} AS build", "${BASE} AS cpu"]
    assert not [c for c in of("RUN", "cpu") if "pip" in c]
    assert [c for c in of("COPY", "cpu") if not c.startswith("--from=build ")] == []


def test_mooncakes_libraries_are_installed_and_the_lists_do_not_stay() -> None:
    (command,) = [c for c in of("RUN", "cpu") if "apt-get install" in c]
    install = command.split("apt-get install")[1].split("&&")[0]
    packages = [word for word in shlex.split(install) if not word.startswith("-")]
    assert set(packages) == {*MOONCAKE_LIBRARIES.values(), "tini"}
    assert packages == sorted(packages)
    assert "--no-install-recommends" in install
    assert command.rstrip().endswith("rm -rf /var/lib/apt/lists/*")


def test_apt_knows_each_package() -> None:
    if shutil.which("apt-cache") is None:
        pytest.skip("apt-cache is not here")
    (command,) = [c for c in of("RUN", "cpu") if "apt-get install" in c]
    packages = [w for w in command.split("apt-get install")[1].split("&&")[0].split() if not w.startswith("-")]
    done = subprocess.run(["apt-cache", "show", "--no-all-versions", *packages], capture_output=True, text=True)
    known = re.findall(r"^Package: (.*)$", done.stdout, flags=re.MULTILINE)
    if not known:
        pytest.skip("apt has no lists: apt-get update has not run")
    assert sorted(known) == packages


def test_it_runs_as_a_number_and_is_stopped_as_it_expects() -> None:
    assert of("USER", "cpu") == ["10001:10001"]
    after = instructions()[[i.word for i in instructions()].index("USER") :]
    assert not [i for i in after if i.word in ("RUN", "COPY", "ADD")]
    assert of("ENTRYPOINT", "cpu") == ['["tini", "--"]']
    assert of("STOPSIGNAL", "cpu") == ["SIGTERM"]


def test_what_is_copied_exists_and_passes_the_ignore_file() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = {source for c in of("COPY", "build") for source in c.split()[:-1]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert not any(fnmatch.fnmatch(".venv", source) for source in allowed)


def test_the_wheel_needs_no_file_that_is_not_copied() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = set(re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', project, flags=re.MULTILINE))
    assert needed == {"README.md", "LICENSE"}
    assert needed <= {source for c in of("COPY", "build") for source in c.split()[:-1]}


def options(command: str) -> set[str]:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return {option for parameter in commands[command].params for option in parameter.opts}


def check_command(words: list[str]) -> None:
    assert words[:2] == ["pdray", "serve"]
    assert {word for word in words[2:] if word.startswith("--")} <= options("serve")


def test_its_command_is_one_of_pdray() -> None:
    (command,) = of("CMD", "cpu")
    check_command(yaml.safe_load(command))


@pytest.fixture
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")))


def test_the_composition_is_locked_down(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert set(service["networks"]) <= set(compose["networks"]), name
        assert "privileged" not in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    assert compose["networks"]["inside"] == {"internal": True}
    assert "ports" not in compose["services"]["valkey"]


def test_the_composition_starts_the_image_with_the_store_beside_it(compose: dict[str, Any]) -> None:
    pdray = compose["services"]["pdray"]
    check_command(pdray["command"])
    assert pdray["command"][-1] == "redis://valkey:6379/0"
    assert pdray["depends_on"] == {"valkey": {"condition": "service_healthy"}}
    build = pdray["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert build["target"] in [line.split(" AS ")[1] for line in of("FROM")]
    assert set(build["args"]) <= {line.partition("=")[0] for line in of("ARG", "build")}
    volumes = {volume.split(":")[0] for volume in pdray["volumes"]}
    assert volumes == set(compose["volumes"])
