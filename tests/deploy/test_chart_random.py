"""Random value sets: what the schema and the chart accept renders to valid objects and a configuration that builds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.deploy import charts
from tests.deploy.charts import KUBERNETES, render
from tests.deploy.serving import check_serve_config

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,10}", fullmatch=True)
SIZES = st.sampled_from(["256Mi", "1Gi", "10Gi", "2Ti"])
MAPS = st.dictionaries(NAMES.map(lambda name: f"example.com/{name}"), NAMES, max_size=2)
BOOLS = st.booleans()
REFUSALS = ("serves nothing", "ReadWriteOnce", "rdma needs", "redisAddress", "a key of scope metrics")
"""What a random set may be refused for; any other error is a defect."""


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any part of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


RESOURCES = st.fixed_dictionaries(
    {
        "requests": st.fixed_dictionaries({"cpu": st.sampled_from(["1", "500m", 2, 1.5]), "memory": SIZES}),
        "limits": st.fixed_dictionaries({"memory": SIZES}, optional={"cpu": st.just("4")}),
    }
)
PLACEMENT = {
    "nodeSelector": MAPS,
    "tolerations": st.lists(st.just({"operator": "Exists", "effect": "NoSchedule"}), max_size=1),
    "runtimeClassName": st.just("") | NAMES,
    "priorityClassName": st.just("") | NAMES,
    "labels": MAPS,
    "annotations": MAPS,
    "env": st.lists(st.fixed_dictionaries({"name": st.just("TZ"), "value": NAMES}), max_size=1),
    "shmSize": SIZES,
    "resources": RESOURCES,
}


def role(least: int) -> st.SearchStrategy[dict[str, Any]]:
    return some(
        replicas=st.integers(least, 40),
        spread=st.sampled_from(["preferred", "required", "none"]),
        startupMinutes=st.integers(10, 200),
        roomForUpdate=BOOLS,
        accelerator=some(count=st.integers(0, 8), resource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu"])),
        **PLACEMENT,
    )


WEIGHTS = st.sampled_from(
    [
        {},
        {"weights": {"source": "hub", "hub": {"existingSecret": "hf"}}, "model": {"path": "owner/name-7B"}},
        {"weights": {"source": "pvc"}, "model": {"path": "/models"}},
        {"weights": {"source": "pvc", "pvc": {"accessMode": "ReadWriteOnce"}}, "model": {"path": "/models/x"}},
        {"weights": {"source": "pvc", "pvc": {"existingClaim": "c", "subPath": "a/b"}}, "model": {"path": "/models/x"}},
    ]
)
KEYS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES, "hash": st.just("sha256:" + "ab" * 32)},
        optional={"tenant": NAMES, "scopes": st.just(["infer"]), "limits": some(concurrency=st.integers(1, 99))},
    ),
    max_size=2,
    unique_by=lambda key: key["name"],
)
ACCESS = some(
    keys=KEYS, tenants=st.dictionaries(NAMES, some(concurrency=st.integers(1, 9)), max_size=1), testKey=some()
) | st.just({"existingSecret": "keys", "fileKey": "k.yaml", "testKey": {"existingSecret": "t"}})
TLS = st.sampled_from(
    [{}, {"existingSecret": "tls"}, {"existingSecret": "tls", "clientCaKey": "ca.crt", "clientSecret": "c"}]
)
EXTERNAL = st.sampled_from(
    [
        {"url": "redis://r:6379/0"},
        {"url": "redis://s1:26379,s2:26379", "topology": "sentinel", "service": "main", "ports": [26379, 6379]},
        {"url": "redis://c1,c2", "topology": "cluster", "username": "pdray", "existingSecret": "x", "passwordKey": "p"},
        {"existingSecret": "x", "topology": "sentinel", "sentinelUsername": "s", "sentinelPasswordKey": "sp"},
        {"url": "rediss://r", "tls": {"existingSecret": "c"}},
        {"url": "rediss://r", "tls": {"existingSecret": "c", "certKey": "tls.crt", "keyKey": "tls.key"}},
    ]
)
VALUES = some(
    nameOverride=NAMES,
    commonLabels=MAPS,
    commonAnnotations=MAPS,
    podLabels=MAPS,
    podAnnotations=MAPS,
    imagePullSecrets=st.lists(NAMES.map(lambda name: {"name": name}), max_size=2),
    roles=some(router=role(1), prefill=role(0), decode=role(0), mixed=role(0)),
    head=some(faultTolerance=some(enabled=BOOLS), **PLACEMENT),
    settings=some(
        engine=some(block_size=st.integers(1, 64), kv_memory_bytes=st.integers(1 << 20, 1 << 40)),
        admission=some(order=st.sampled_from(["fcfs", "edf", "priority", "fair"]), weights=st.just(["a=2"])),
    ),
    live=some(
        slo=some(ttft_ms=st.floats(1, 1e5), tpot_ms=st.integers(1, 1000)),
        admission=some(max_waiting=st.integers(1, 10**6), margin=st.floats(0.1, 1)),
        limits=some(schema_bytes=st.integers(1, 1 << 20)),
        budget=some(first_token_s=st.floats(0.5, 1000)),
        router=some(policy=st.sampled_from(["cost", "round-robin", "least-loaded"])),
    ),
    access=ACCESS,
    tls=TLS,
    engineThreads=st.integers(1, 64),
    drainSeconds=st.integers(1, 3600),
    rayService=some(upgradeStrategy=st.sampled_from(["NewCluster", "None"])),
    rayAuth=some(enabled=BOOLS),
    redis=st.sampled_from([{}, {"mode": "none"}]) | EXTERNAL.map(lambda e: {"mode": "external", "external": e}),
    mooncakeMaster=some(enabled=BOOLS),
    rdma=some(enabled=BOOLS, count=st.integers(1, 4)),
    transport=st.sampled_from(["auto", "mooncake", "tcp"]),
    service=some(type=st.sampled_from(["ClusterIP", "NodePort"]), port=st.integers(1, 65535), annotations=MAPS),
    ingress=some(enabled=BOOLS, hosts=st.lists(st.just("a.example"), max_size=1), tlsSecret=NAMES),
    networkPolicy=some(enabled=BOOLS, clients=st.lists(st.just({"podSelector": {}}), max_size=1)),
    podDisruptionBudget=some(enabled=BOOLS),
    monitoring=some(
        serviceMonitor=some(enabled=BOOLS, apiKey=some(existingSecret=NAMES)), podMonitor=some(enabled=BOOLS)
    ),
    serviceAccount=some(create=BOOLS, name=NAMES),
)
RELEASES = st.from_regex(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True)


def check(values: dict[str, Any], weights: dict[str, Any], release: str, where: tuple[str, str, str]) -> None:
    helm_name, mode, version = where
    outcome = render(
        values | weights, helm_name=helm_name, apis=charts.apis_for(mode), release=release, kubernetes=version
    )
    if outcome.error:
        assert any(reason in outcome.error for reason in REFUSALS), outcome.error
        return
    charts.check_kubernetes(outcome.objects, version)
    charts.check_rayservice(outcome.objects)
    made = check_serve_config(outcome.serve_config(), charts.environment_of(outcome))
    roles = {role for role, _, _ in charts.pods(outcome.objects)}
    assert made == roles & {"router", "prefill", "decode", "mixed"}
    for _, _, spec in charts.pods(outcome.objects):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert all(c["resources"]["limits"] and c["securityContext"] for c in charts.containers(spec))
        assert spec.get("imagePullSecrets", []) == values.get("imagePullSecrets", [])


PLACES = st.tuples(
    st.sampled_from(["helm3", "helm4"]), st.sampled_from(["rayservice", "plain"]), st.sampled_from(KUBERNETES)
)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # each example runs Helm: shrinking would take minutes


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=QUIET, phases=PHASES)
@given(values=VALUES, weights=WEIGHTS, release=RELEASES, where=PLACES)
def test_a_random_set_renders_valid_or_is_refused_with_a_reason(
    values: dict[str, Any], weights: dict[str, Any], release: str, where: tuple[str, str, str]
) -> None:
    check(values, weights, release, where)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, phases=PHASES)
@given(values=VALUES, weights=WEIGHTS, release=RELEASES, where=PLACES)
def test_many_random_sets_render_valid_or_are_refused_with_a_reason(
    values: dict[str, Any], weights: dict[str, Any], release: str, where: tuple[str, str, str]
) -> None:
    check(values, weights, release, where)
