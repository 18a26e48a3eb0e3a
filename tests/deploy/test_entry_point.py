"""The image's entry point as a container engine would run it: uid 10001, a read-only root, its volumes, namespaces.

The image itself is not built here; the project's virtual environment stands in for what it would hold.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
import yaml

from tests.deploy.pods import (
    AS_USER,
    PATH,
    SOURCES,
    make_folders,
    mount_points,
    read_only_root,
    skip_unless_possible,
)
from tests.deploy.test_image import ROOT, of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(500)]
GRACE_S = 90.0
"""stop_grace_period in deploy/compose.yaml."""


def environment() -> dict[str, str]:
    """What the image sets, and how a test's machine differs: a model that loads quickly, and small pools."""
    pairs = [pair for line in of("ENV", "cpu") for pair in shlex.split(line)]
    image = dict(pair.split("=", 1) for pair in pairs)
    settings = {"PDRAY_MODEL__PATH": "/models/tiny", "PDRAY_ENGINE__NUM_BLOCKS": "512"}
    return image | settings | {"PATH": PATH, "PYTHONPATH": SOURCES, "LANG": "C.UTF-8"}


class Container:
    """A process tree in mount, process and network namespaces of its own."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        env = [f"{name}={value}" for name, value in environment().items()]
        words = shlex.join([*AS_USER, "env", "-i", *env, *command])
        script = " && ".join([*read_only_root(folder), "ip link set lo up", "cd /var/lib/pdray", f"exec {words}"])
        unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*unshare, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @cached_property
    def init(self) -> int:
        """The first process of the container, as the machine numbers it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        while not (found := children.read_text().split()):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return int(found[0])

    def inside(self, *command: str, user: bool = False) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.init}", "--mount", "--net", "--pid", "--wdns=/"]
        words = [*enter, *(AS_USER if user else []), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    def fetch(self, url: str, body: str = "") -> str:
        """The answer; empty where there is none."""
        code = (
            "import sys, urllib.request as r; u, b = sys.argv[1:]; "
            "q = r.Request(u, b.encode() or None, {'Content-Type': 'application/json'}); "
            "sys.stdout.write(r.build_opener(r.ProxyHandler({})).open(q, timeout=30).read().decode())"
        )
        return self.inside(sys.executable, "-c", code, url, body).stdout

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.init, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def container(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Container]:
    skip_unless_possible()
    make_folders(tmp_path)
    model = tmp_path / "models" / "tiny"
    shutil.copytree(tiny_model_folder, model, copy_function=shutil.copyfile)
    model.chmod(0o755)
    (entry,), (command,) = of("ENTRYPOINT", "cpu"), of("CMD", "cpu")
    init = yaml.safe_load(entry)
    if shutil.which(init[0]) is None:
        init = []  # then pdray is the first process itself
    program, *arguments = yaml.safe_load(command)
    assert program == "pdray"  # the installed script may be of another checkout
    with mount_points():
        made = Container(tmp_path, [*init, sys.executable, "-m", "services.cli", *arguments])
        try:
            yield made
        finally:
            made.end()


def test_it_starts_serves_and_stops_in_time_as_a_user_who_can_write_to_its_volumes_only(container: Container) -> None:
    deadline = time.monotonic() + 240
    while '"ready"' not in container.fetch("http://127.0.0.1:8000/ready"):
        assert container.process.poll() is None, container.log.read_text()
        assert time.monotonic() < deadline, container.log.read_text()
        time.sleep(1)
    body = {"prompt": "one two", "max_tokens": 4, "ignore_eos": True}
    answer = json.loads(container.fetch("http://127.0.0.1:8000/v1/completions", json.dumps(body)))
    assert answer["usage"]["completion_tokens"] == 4
    status = Path(f"/proc/{container.init}/status").read_text()
    assert "\nUid:\t10001\t10001\t10001\t10001\n" in status
    assert "\nCapBnd:\t0000000000000000\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    for place, code in (("/", 1), ("/usr", 1), ("/etc", 1), ("/tmp", 0), ("/var/lib/pdray", 0)):
        assert container.inside("test", "-w", place, user=True).returncode == code, place
    began = time.monotonic()
    os.kill(container.init, signal.SIGTERM)
    assert container.process.wait(GRACE_S) == 0, container.log.read_text()
    assert time.monotonic() - began < GRACE_S


def test_the_grace_time_is_that_of_the_composition() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["pdray"]["stop_grace_period"] == f"{GRACE_S:.0f}s"
