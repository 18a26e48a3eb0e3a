"""API keys, TLS, live settings and every kind of Redis in the chart: what a pod is told lies where it is told."""

from __future__ import annotations

import base64
from pathlib import PurePosixPath
from typing import Any

import pytest

from services.router.access.keys import read_keys
from tests.deploy import charts
from tests.deploy.charts import FULL_VALUES, MODES, Outcome, pods, rendered
from tests.deploy.serving import check_serve_config

KEY = {"name": "alice", "hash": "sha256:" + "ab" * 32, "tenant": "team-a", "limits": {"concurrency": 8}}
TLS = {"existingSecret": "tls", "clientCaKey": "ca.crt", "clientSecret": "probe"}
SECRETS = {  # keys of the Secrets that a release is given
    "tls": {"tls.crt", "tls.key", "ca.crt"},
    "pdray-tls": {"tls.crt", "tls.key", "ca.crt"},
    "certs": {"ca.crt", "me.crt", "me.key"},
}


def args_of(outcome: Outcome) -> dict[str, Any]:
    return dict(outcome.serve_config()["applications"][0]["args"])


def pod_of(outcome: Outcome, role: str) -> dict[str, Any]:
    (spec,) = [spec for found, _, spec in pods(outcome.objects) if found == role]
    return spec


def env_of(outcome: Outcome, role: str) -> dict[str, Any]:
    return {e["name"]: e for e in pod_of(outcome, role)["containers"][0]["env"]}


def secret_folders(spec: dict[str, Any]) -> dict[str, str]:
    """Mount point → Secret."""
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    mounts = spec["containers"][0]["volumeMounts"]
    assert all(m.get("readOnly") for m in mounts if m["name"] in secrets)
    return {m["mountPath"]: secrets[m["name"]] for m in mounts if m["name"] in secrets}


@MODES
class TestKeys:
    def test_entries_become_a_secret_that_pdray_reads(self, mode: str) -> None:
        values = {"access": {"keys": [KEY], "tenants": {"team-a": {"requests_per_minute": 60}}}}
        outcome = rendered(values, apis=charts.apis_for(mode))
        data = outcome.one("Secret", "-api-keys")["data"]
        found = read_keys(base64.b64decode(data["keys.yaml"]))
        assert [(key.name, key.tenant, key.limits.concurrency) for key in found.keys] == [("alice", "team-a", 8)]
        assert found.tenants["team-a"].requests_per_minute == 60

    @pytest.mark.parametrize(
        ("access", "secret"),
        [({"keys": [KEY]}, "r-pdray-api-keys"), ({"existingSecret": "mine", "fileKey": "k.json"}, "mine")],
    )
    def test_routers_alone_see_the_file_that_the_configuration_names(
        self, mode: str, access: dict[str, Any], secret: str
    ) -> None:
        outcome = rendered({"access": access}, apis=charts.apis_for(mode))
        file = PurePosixPath(args_of(outcome)["access.keys_file"])
        assert file.name == access.get("fileKey", "keys.yaml")
        for role in ("router", "prefill", "decode", "head"):
            folders = secret_folders(pod_of(outcome, role))
            assert folders == ({str(file.parent): secret} if role == "router" else {})
        mounts = pod_of(outcome, "router")["containers"][0]["volumeMounts"]
        assert not any("subPath" in m for m in mounts), "a file mounted by subPath never changes"

    def test_without_keys_nothing_is_asked_for(self, mode: str) -> None:
        outcome = rendered(apis=charts.apis_for(mode))
        assert "access.keys_file" not in args_of(outcome)
        assert not [o for o in outcome.objects if o["metadata"]["name"].endswith("-api-keys")]


@MODES
@pytest.mark.parametrize("asks_back", [False, True], ids=["server", "mutual"])
def test_tls_reaches_probes_services_monitors_and_the_test(mode: str, asks_back: bool) -> None:
    values = {
        "tls": TLS if asks_back else {"existingSecret": "tls"},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    outcome = rendered(values, apis=charts.apis_for(mode))
    args = args_of(outcome)
    folders = secret_folders(pod_of(outcome, "router"))
    for name in ("tls.cert_file", "tls.key_file", *(["tls.client_ca_file"] if asks_back else [])):
        file = PurePosixPath(args[name])
        assert file.name in SECRETS[folders[str(file.parent)]]
    assert ("tls.client_ca_file" in args) is asks_back
    assert [p["appProtocol"] for p in outcome.one("Service", "-router")["spec"]["ports"]] == ["https", "https"]
    probe = pod_of(outcome, "router")["containers"][0]["readinessProbe"]
    if asks_back:
        *_, url, certificate, client = probe["exec"]["command"]
        assert url.startswith("https://127.0.0.1:8000/")
        assert (certificate, folders[client]) == (args["tls.cert_file"], "probe")
    else:
        assert probe["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = outcome.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "r-pdray-router.here.svc"
    assert ("keySecret" in endpoint["tlsConfig"]) is asks_back
    test = pod_of(outcome, "test")
    items = [v["secret"].get("items") for v in test["volumes"] if v["name"] == "tls"]
    assert items == [[{"key": "tls.crt", "path": "tls.crt"}]], "the test has no use for the server's private key"
    assert test["containers"][0]["command"][3].startswith("https://")


def test_keys_reach_the_test_and_prometheus_from_their_secrets() -> None:
    outcome = rendered(file=FULL_VALUES, apis=charts.ALL_APIS)
    (entry,) = pod_of(outcome, "test")["containers"][0]["env"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "pdray-test-key", "key": "key"}
    (endpoint,) = outcome.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "pdray-metrics-key", "key": "key"}


REDIS = [
    (
        {"url": "redis://s1:26379,s2:26379", "topology": "sentinel", "service": "main", "sentinelUsername": "watch"},
        {"redis.topology": "sentinel", "redis.service": "main", "redis.sentinel_username": "watch"},
    ),
    (
        {"existingSecret": "r", "topology": "cluster", "username": "pdray", "passwordKey": "pw"},
        {"redis.topology": "cluster", "redis.username": "pdray"},
    ),
    (
        {"url": "rediss://r:6379", "tls": {"existingSecret": "certs", "certKey": "me.crt", "keyKey": "me.key"}},
        {"redis.ca_file": "ca.crt", "redis.cert_file": "me.crt", "redis.key_file": "me.key"},
    ),
]


@pytest.mark.parametrize(("external", "expected"), REDIS, ids=["sentinel", "cluster", "tls"])
def test_every_kind_of_redis_is_reached_as_it_asks(external: dict[str, Any], expected: dict[str, str]) -> None:
    values = {"redis": {"mode": "external", "external": external | {"ports": [6379, 26379]}}}
    outcome = rendered(values, apis=())
    args = args_of(outcome)
    told = {n: v for n, v in args.items() if n.startswith("redis.")}
    assert {n: PurePosixPath(v).name for n, v in told.items()} == expected
    for role in ("router", "prefill", "decode"):
        folders = secret_folders(pod_of(outcome, role))
        for name, value in told.items():
            if name.endswith("_file"):
                file = PurePosixPath(value)
                assert file.name in SECRETS[folders[str(file.parent)]]
        env = env_of(outcome, role)
        assert ("PDRAY_REDIS__PASSWORD" in env) is ("passwordKey" in external)
        assert ("value" in env["PDRAY_REDIS__URL"]) is ("url" in external)
    check_serve_config(outcome.serve_config(), charts.environment_of(outcome))
    rules = outcome.one("NetworkPolicy", "-ray")["spec"]["egress"]
    assert [[p["port"] for p in rule["ports"]] for rule in rules if not rule.get("to")] == [[53, 53], [6379, 26379]]


@MODES
def test_rays_own_redis_may_have_a_user(mode: str) -> None:
    outside = {"enabled": True, "redisAddress": "r:6379", "username": "ray", "existingSecret": "gcs"}
    outcome = rendered({"head": {"faultTolerance": outside}}, apis=charts.apis_for(mode))
    if mode == "rayservice":
        options = outcome.one("RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        assert options["redisUsername"] == {"value": "ray"}
        charts.check_rayservice(outcome.objects)
    else:
        assert env_of(outcome, "head")["REDIS_USERNAME"]["value"] == "ray"
        assert '--redis-username="$REDIS_USERNAME"' in pod_of(outcome, "head")["containers"][0]["command"][-1]


@MODES
def test_a_change_of_live_settings_touches_the_routers_user_config_and_nothing_else(mode: str) -> None:
    sets = [{"live": {"slo": {"ttft_ms": n}, "limits": {"schema_bytes": 1 << 20}}} for n in (300, 400)]
    one, two = (rendered(values, apis=charts.apis_for(mode)).serve_config() for values in sets)
    (router,) = [d for d in one["applications"][0]["deployments"] if d["name"] == "router"]
    assert router["user_config"] == {"slo": {"ttft_ms": 300}, "limits": {"schema_bytes": 1 << 20}}
    router["user_config"]["slo"]["ttft_ms"] = 400
    assert one == two
    assert "user_config" not in str(rendered(apis=charts.apis_for(mode)).serve_config())
