"""Renders the Helm chart with real Helm binaries and judges what comes out by real schemas."""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as kubernetes_schemas
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "pdray"
FULL_VALUES = CHART / "ci" / "full-values.yaml"
RAYSERVICE = Path(__file__).parent / "data" / "rayservice-v1.json.gz"
"""KubeRay's definition of RayService v1: the openAPIV3Schema of its ray.io_rayservices.yaml, without descriptions.
Apache-2.0, The KubeRay Authors."""
KUBERAY = "ray.io/v1/RayService"
PROMETHEUS = ("monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PodMonitor")
ALL_APIS = (KUBERAY, *PROMETHEUS)
KUBERNETES = tuple(f"1.{minor}" for minor in range(27, 38))
QUICK_KUBERNETES = ("1.27", "1.32", "1.37")
FOREIGN = ("RayService", "ServiceMonitor", "PodMonitor", "HTTPRoute")  # kinds that Kubernetes' own schemas do not hold

Object = dict[str, Any]


def helm(name: str) -> Path:
    """The binary ``helm3`` or ``helm4``; skips the test where .ci/helm.sh has not put it there."""
    path = ROOT / ".ci" / "bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not in .ci/bin: run .ci/helm.sh")
    return path


HELMS = pytest.mark.parametrize("helm_name", ["helm3", "helm4"])
MODES = pytest.mark.parametrize("mode", ["rayservice", "plain"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of Helm gave: objects, or the error."""

    objects: tuple[Object, ...]
    error: str

    def one(self, kind: str, suffix: str = "") -> Object:
        found = [o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, f"{len(found)} of {kind} {suffix}: {sorted(names(self.objects))}"
        return found[0]

    def serve_config(self) -> Object:
        """The Serve configuration, in either mode."""
        for o in self.objects:
            if o["kind"] == "RayService":
                return dict(yaml.safe_load(o["spec"]["serveConfigV2"]))
        return dict(json.loads(self.one("ConfigMap", "-files")["data"]["serve.json"]))


def run_helm(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:  # its own caches: nothing of the user's is read or written
        env = {"HOME": folder, "HELM_CACHE_HOME": folder, "HELM_CONFIG_HOME": folder, "HELM_DATA_HOME": folder}
        return subprocess.run([helm(name), *arguments], capture_output=True, text=True, env=env, timeout=60)


def render(
    values: Mapping[str, Any] | None = None,
    *,
    helm_name: str = "helm4",
    apis: tuple[str, ...] = (KUBERAY,),
    release: str = "r",
    file: Path | None = None,
    kubernetes: str = "1.30",
) -> Outcome:
    """`helm template` with these values; ``file`` lies below them."""
    arguments = ["template", release, str(CHART), "--namespace", "here", "--kube-version", kubernetes]
    for api in apis:
        arguments += ["--api-versions", api]
    if file is not None:
        arguments += ["--values", str(file)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as given:
        json.dump(dict(values or {}), given)  # JSON is YAML, and quotes words such as n and on
        given.flush()
        done = run_helm(helm_name, *arguments, "--values", given.name)
    if done.returncode:
        return Outcome((), done.stderr)
    assert not done.stderr, done.stderr
    return Outcome(tuple(o for o in yaml.load_all(done.stdout, yaml.CSafeLoader) if o), "")


def rendered(*args: Any, **kwargs: Any) -> Outcome:
    outcome = render(*args, **kwargs)
    assert not outcome.error, outcome.error
    return outcome


def apis_for(mode: str) -> tuple[str, ...]:
    return ALL_APIS if mode == "rayservice" else PROMETHEUS


def names(objects: tuple[Object, ...]) -> set[tuple[str, str]]:
    return {(o["kind"], o["metadata"]["name"]) for o in objects}


def pods(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object, Object]]:
    """(role, metadata, spec) of each pod that these objects lead to, hooks too."""
    for o in objects:
        spec = o.get("spec", {})
        templates: list[Object] = []
        if o["kind"] in ("Deployment", "StatefulSet", "Job"):
            templates = [spec["template"]]
        elif o["kind"] == "Pod":
            templates = [o]
        elif o["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            templates = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
        for template in templates:
            yield template["metadata"]["labels"]["pdray/role"], template["metadata"], template["spec"]


def environment_of(outcome: Outcome) -> dict[str, str]:
    """PDRAY_* of the pods that run pdray; what comes from a Secret is made up."""
    found: dict[str, str] = {}
    for role, _, spec in pods(outcome.objects):
        if role in ("router", "prefill", "decode", "mixed"):
            for entry in spec["containers"][0]["env"]:
                if entry["name"].startswith("PDRAY_"):
                    found[entry["name"]] = entry.get("value", "s" * 48).replace("$(VALKEY_PASSWORD)", "pw")
    if found.get("PDRAY_REDIS__URL") == "s" * 48:
        found["PDRAY_REDIS__URL"] = "rediss://:pw@r:6379"
    return found


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


@cache
def _definitions(version: str) -> Any:
    return Resource.from_contents(
        kubernetes_schemas.schema_contents(f"kubernetes-json-schema/{_folder(version)}/_definitions.json", version)
    )


@cache
def _folder(version: str) -> str:
    (full,) = {v for v in kubernetes_schemas.all_versions() if v.startswith(f"{version}.")}
    return f"v{full}-local-strict"


@cache
def _kubernetes_validator(kind: str, api: str, version: str) -> jsonschema.Draft202012Validator:
    group, _, number = api.rpartition("/")
    file = f"{kind.lower()}-{group.split('.')[0] + '-' if group else ''}{number}.json"
    schema = kubernetes_schemas.schema_contents(f"kubernetes-json-schema/{_folder(version)}/{file}", version)
    registry = _definitions(version) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def check_kubernetes(objects: tuple[Object, ...], version: str) -> None:
    """Raise ValidationError where an object, or a pod inside a foreign one, is not one of this Kubernetes version."""
    for o in objects:
        if o["kind"] not in FOREIGN:
            _kubernetes_validator(o["kind"], o["apiVersion"], version).validate(o)
    for _, metadata, spec in pods(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        _kubernetes_validator("Pod", "v1", version).validate(pod)


@cache
def _rayservice_validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(gzip.decompress(RAYSERVICE.read_bytes()))
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _close(schema: Any) -> None:
    """Refuse unknown fields wherever the schema lists its own."""
    if isinstance(schema, list):
        for item in schema:
            _close(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for item in schema.values():
            _close(item)


def check_rayservice(objects: tuple[Object, ...]) -> None:
    """Raise ValidationError where a RayService has a wrong or unknown field."""
    for o in objects:
        if o["kind"] == "RayService":
            _rayservice_validator().validate(o)
