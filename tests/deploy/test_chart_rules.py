"""What the chart promises about its pods and names; A47 is one of the project's collected user cases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy import charts
from tests.deploy.charts import FULL_VALUES, HELMS, MODES, containers, names, pods, rendered

WORKERS = ("prefill", "decode", "mixed")
BOTH = pytest.mark.parametrize("file", [None, FULL_VALUES], ids=["default", "full"])

RWO = {"source": "pvc", "pvc": {"accessMode": "ReadWriteOnce"}}


@MODES
@BOTH
class TestPods:
    def test_every_pod_carries_pull_secrets_security_and_resources(self, mode: str, file: Any) -> None:
        secrets = [{"name": "registry"}]
        outcome = rendered({"imagePullSecrets": secrets}, file=file, apis=charts.apis_for(mode))
        seen = set()
        for role, metadata, spec in pods(outcome.objects):
            seen.add(role)
            assert spec["imagePullSecrets"] == secrets, role
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsUser"] == 10001
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
            assert not any("hostPath" in volume for volume in spec.get("volumes", []))
            assert metadata["labels"]["app.kubernetes.io/instance"] == "r"
            if file:
                assert metadata["labels"]["cost"] == "inference"
                assert metadata["labels"]["team"] == "serving"
                assert metadata["annotations"]["example.com/scrape"] == "true"
            for container in containers(spec):
                self.check_container(role, container, has_rdma=file is not None)
        assert seen >= {"head", "router", "prefill", "decode", "valkey", "test"}

    @staticmethod
    def check_container(role: str, container: dict[str, Any], has_rdma: bool) -> None:
        security = container["securityContext"]
        locks = has_rdma and role in WORKERS and container["name"] == "ray-worker"
        assert security["capabilities"] == ({"drop": ["ALL"], "add": ["IPC_LOCK"]} if locks else {"drop": ["ALL"]})
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["runAsNonRoot"] is True
        resources = container["resources"]
        assert "memory" in resources["limits"]
        assert set(resources["requests"]) >= {"cpu", "memory"}
        assert ("rdma/hca_shared_devices_a" in resources["limits"]) == locks

    def test_shared_memory_is_a_sized_memory_volume(self, mode: str, file: Any) -> None:  # A47
        outcome = rendered(file=file, apis=charts.apis_for(mode))
        for role, _, spec in pods(outcome.objects):
            if role not in ("head", "router", *WORKERS):
                continue
            (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
            (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            assert volume["emptyDir"]["sizeLimit"] == ("2Gi" if file and role == "prefill" else "512Mi")

    def test_a_startup_probe_covers_loading_and_no_other_probe_depends_on_it(self, mode: str, file: Any) -> None:
        for role, _, spec in pods(rendered(file=file, apis=charts.apis_for(mode)).objects):  # A47
            if role not in ("router", *WORKERS):
                continue
            main = spec["containers"][0]
            startup = main["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
            assert "initialDelaySeconds" not in main["livenessProbe"]
            # liveness asks the raylet, which does not load weights
            assert main["livenessProbe"]["httpGet"] == {"path": "/api/local_raylet_healthz", "port": 52365}
            if role == "router" and file is None:
                assert main["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000, "scheme": "HTTP"}
            elif role == "router":  # where it wants a client's certificate, which kubelet has none of
                assert "https://127.0.0.1:8000/ready" in main["readinessProbe"]["exec"]["command"]
            else:
                assert main["readinessProbe"]["exec"] == startup["exec"]

    def test_a_pod_gets_the_time_to_drain(self, mode: str, file: Any) -> None:
        outcome = rendered(file=file, apis=charts.apis_for(mode))
        drain_s = outcome.serve_config()["applications"][0]["args"]["worker.drain_s"]
        for role, _, spec in pods(outcome.objects):
            if role in ("router", *WORKERS):
                limit_s = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
                assert drain_s + 10 <= limit_s < spec["terminationGracePeriodSeconds"]

    def test_the_service_selects_routers_and_nothing_else(self, mode: str, file: Any) -> None:
        outcome = rendered(file=file, apis=charts.apis_for(mode))
        selector = outcome.one("Service", "-router")["spec"]["selector"]
        chosen = [role for role, metadata, _ in pods(outcome.objects) if selector.items() <= metadata["labels"].items()]
        assert chosen == ["router"]

    def test_replicas_find_room_in_pods_of_their_role_only(self, mode: str, file: Any) -> None:
        outcome = rendered(file=file, apis=charts.apis_for(mode))
        offered = ray_resources(outcome)
        (app,) = outcome.serve_config()["applications"]
        for deployment in app["deployments"]:
            ((resource, share),) = deployment["ray_actor_options"]["resources"].items()
            assert offered[deployment["name"]] == (resource, deployment["num_replicas"])
            assert deployment["max_replicas_per_node"] == 1
            assert share in (0.5, 1.0)
        assert len({resource for resource, _ in offered.values()}) == len(offered)


def ray_resources(outcome: charts.Outcome) -> dict[str, tuple[str, int]]:
    """Role → custom resource that each of its pods offers, and the number of pods."""
    found = {}
    for o in outcome.objects:
        if o["kind"] == "RayService":
            for group in o["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
                text = group["rayStartParams"]["resources"]
                assert text[0] == text[-1] == "'", "KubeRay puts the parameter into a shell's command line"
                found[group["groupName"]] = (text[1:-1], group["replicas"])
        elif o["kind"] == "Deployment":
            role = o["spec"]["template"]["metadata"]["labels"]["pdray/role"]
            (*_, command) = o["spec"]["template"]["spec"]["containers"][0]["command"]
            if "--resources='" in command:
                found[role] = (command.split("--resources='")[1].split("'")[0], o["spec"]["replicas"])
    result = {}
    for role, (text, count) in found.items():
        ((resource, amount),) = json.loads(text).items()
        assert amount == 1
        result[role] = (resource, count)
    return result


@MODES
def test_two_releases_in_one_namespace_share_no_object_and_no_pod(mode: str) -> None:
    apis = charts.apis_for(mode)
    first, second = (rendered(release=name, file=FULL_VALUES, apis=apis) for name in ("one", "two"))
    assert names(first.objects) & names(second.objects) == set()
    selectors = [o["spec"]["selector"] for o in first.objects if o["kind"] == "Service"]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in first.objects if o["kind"] in ("StatefulSet",)]
    policies = [o["spec"]["podSelector"]["matchLabels"] for o in first.objects if o["kind"] == "NetworkPolicy"]
    for selector in [*selectors, *policies]:
        assert not [r for r, m, _ in pods(second.objects) if selector.items() <= m["labels"].items()]
    spaces = {o.serve_config()["applications"][0]["args"]["namespace"] for o in (first, second)}
    assert len(spaces) == 2


@HELMS
@MODES
def test_long_release_names_give_valid_and_different_names(helm_name: str, mode: str) -> None:
    releases = ["a" * 52 + "b", "a" * 52 + "c"]
    outcomes = [
        rendered(release=r, helm_name=helm_name, file=FULL_VALUES, apis=charts.apis_for(mode)) for r in releases
    ]
    for outcome in outcomes:
        charts.check_kubernetes(outcome.objects, "1.37")
        for o in outcome.objects:
            assert len(o["metadata"]["name"]) <= (47 if o["kind"] == "RayService" else 63)  # KubeRay appends to it
            values = list(o["metadata"].get("labels", {}).values())
            assert all(len(v) <= 63 for v in values)
    assert names(outcomes[0].objects) & names(outcomes[1].objects) == set()


@MODES
def test_a_volume_for_one_node_brings_all_pods_that_mount_it_to_one_node(mode: str) -> None:
    outcome = rendered({"weights": RWO, "model": {"path": "/models/m"}}, apis=charts.apis_for(mode))
    claims = [o for o in outcome.objects if o["kind"] == "PersistentVolumeClaim"]
    assert [c["spec"]["accessModes"] for c in claims] == [["ReadWriteOnce"]]
    mounting = set()
    for role, metadata, spec in pods(outcome.objects):
        if any(v.get("persistentVolumeClaim") for v in spec.get("volumes", [])):
            mounting.add(role)
            (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert term["labelSelector"]["matchLabels"].items() <= metadata["labels"].items()
    assert mounting == {"router", "prefill", "decode"}


@MODES
def test_ray_asks_for_its_token_by_default_and_secrets_lie_in_a_secret_only(mode: str) -> None:
    outcome = rendered(apis=charts.apis_for(mode))
    keys = outcome.one("Secret", "-keys")
    assert set(keys["data"]) == {"secret", "auth_token", "valkey_password"}
    for role, _, spec in pods(outcome.objects):
        for container in spec["containers"]:
            env = {e["name"]: e for e in container.get("env", [])}
            if container["name"].startswith("ray-"):
                assert env["RAY_AUTH_MODE"]["value"] == "token"
                assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "auth_token"
                assert env["PDRAY_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "r-pdray-keys", "key": "secret"}
            for name, entry in env.items():
                literal = not any(word in name for word in ("SECRET", "TOKEN", "PASSWORD"))
                assert literal or "valueFrom" in entry, f"{role}: {name}"
    if mode == "rayservice":
        auth = outcome.one("RayService")["spec"]["rayClusterConfig"]["authOptions"]
        assert auth == {"mode": "token", "secretName": "r-pdray-keys"}


@MODES
def test_the_network_denies_by_default_and_opens_the_needed_ports_only(mode: str) -> None:
    outcome = rendered(apis=charts.apis_for(mode))
    policies = {o["metadata"]["name"]: o["spec"] for o in outcome.objects if o["kind"] == "NetworkPolicy"}
    deny = policies.pop("r-pdray-deny")
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    for role, metadata, _ in pods(outcome.objects):
        assert deny["podSelector"]["matchLabels"].items() <= metadata["labels"].items(), role

    def from_anyone(spec: dict[str, Any]) -> set[int]:
        return {p["port"] for rule in spec.get("ingress", []) if not rule.get("from") for p in rule["ports"]}

    assert {name: from_anyone(spec) for name, spec in policies.items() if from_anyone(spec)} == {
        "r-pdray-router": {8000, 9000}
    }
    dashboard = [name for name in policies if name.endswith("-head")]
    assert dashboard == (["r-pdray-head"] if mode == "rayservice" else [])
    outside = [p["port"] for rule in policies["r-pdray-ray"]["egress"] if not rule.get("to") for p in rule["ports"]]
    assert outside == [53, 53]
    hub = rendered({"weights": {"source": "hub"}, "model": {"path": "a/b"}}, apis=charts.apis_for(mode))
    egress = hub.one("NetworkPolicy", "-ray")["spec"]["egress"]
    assert [p["port"] for rule in egress if not rule.get("to") for p in rule["ports"]] == [53, 53, 443]


def test_each_role_has_a_disruption_budget_that_spares_all_but_one() -> None:
    outcome = rendered(file=FULL_VALUES, apis=charts.ALL_APIS)
    budgets = {o["spec"]["selector"]["matchLabels"]["pdray/role"]: o for o in outcome.objects if "Budget" in o["kind"]}
    assert set(budgets) == {"router", "prefill", "decode", "mixed"}
    assert {b["spec"]["maxUnavailable"] for b in budgets.values()} == {1}


def test_a_scale_changes_counts_and_no_argument() -> None:
    small, large = (rendered({"roles": {"decode": {"replicas": n}}}).serve_config() for n in (1, 5))
    assert small["applications"][0]["args"] == large["applications"][0]["args"]
    assert small != large


def test_a_token_for_the_hub_and_an_external_redis_come_from_their_secrets() -> None:
    values = {
        "weights": {"source": "hub", "hub": {"existingSecret": "hf"}},
        "model": {"path": "owner/name"},
        "redis": {"mode": "external", "external": {"existingSecret": "redis", "ports": [6380]}},
    }
    outcome = rendered(values)
    for role, _, spec in pods(outcome.objects):
        if role in ("router", *WORKERS):
            env = {e["name"]: e for e in spec["containers"][0]["env"]}
            assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
            assert env["PDRAY_REDIS__URL"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "url"}
    assert not [o for o in outcome.objects if o["kind"] == "StatefulSet"]
