"""What the chart refuses, by its schema or with a reason, before anything reaches a cluster."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest

from services.config import PAIR_POLICIES, ServeConfig
from services.live_config import LIVE
from services.slo_config import ORDERS
from tests.deploy.charts import CHART, HELMS, render

RWO = {"source": "pvc", "pvc": {"accessMode": "ReadWriteOnce"}}

MANAGED = {  # settings that the chart gives under values of its own
    *("model.path", "model.served_name", "model.dtype", "model.max_model_len", "model.cache_dir"),
    *("engine.num_threads", "transfer.transport", "transfer.protocol", "transfer.device"),
    *("router.host", "router.port", "router.grpc_port", "router.serve_port", "router.serve_grpc_port"),
    *("router.replicas", "redis.url", "redis.is_embedded", "redis.namespace"),
    *("redis.topology", "redis.service", "redis.username", "redis.password"),
    *("redis.sentinel_username", "redis.sentinel_password", "redis.ca_file", "redis.cert_file", "redis.key_file"),
    *("worker.host", "worker.port", "worker.drain_s"),
    *("access.keys_file", "tls.cert_file", "tls.key_file", "tls.client_ca_file"),
}
SENTINELS = {"mode": "external", "external": {"existingSecret": "r", "topology": "sentinel"}}
KEY = {"name": "a", "hash": "sha256:" + "0" * 64}


@HELMS
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"roles": {"prefil": {"replicas": 2}}}, "prefil"),
        ({"roles": {"prefill": {"replica": 2}}}, "replica"),
        ({"roles": {"prefill": {"replicas": "two"}}}, "replicas"),
        ({"roles": {"prefill": {"replicas": -1}}}, "replicas"),
        ({"roles": {"router": {"replicas": 0}}}, "replicas"),
        ({"roles": {"prefill": {"shmSize": "2 GB"}}}, "shmSize"),
        ({"roles": {"prefill": {"startupMinutes": 1}}}, "startupMinutes"),
        ({"roles": {"prefill": {"resources": {"limit": {}}}}}, "limit"),
        ({"settings": {"engine": {"blok_size": 32}}}, "blok_size"),
        ({"settings": {"engine": {"block_size": "many"}}}, "block_size"),
        ({"settings": {"worker": {"drain_s": 3}}}, "drain_s"),
        ({"settings": {"slo": {"ttft_ms": 3}}}, "slo"),
        ({"settings": {"tls": {"cert_file": "/x"}}}, "tls"),
        ({"live": {"slo": {"ttft": 3}}}, "ttft"),
        ({"live": {"engine": {"block_size": 32}}}, "engine"),
        ({"live": {"router": {"policy": "luck"}}}, "policy"),
        ({"access": {"keys": [{"name": "a", "hash": "my-secret-key"}]}}, "hash"),
        ({"access": {"keys": [KEY | {"scopes": ["root"]}]}}, "scopes"),
        ({"tls": {"certificate": "x"}}, "certificate"),
        ({"redis": {"external": {"topology": "sentinels"}}}, "topology"),
        ({"redis": {"external": {"port": 6379}}}, "port"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"redis": {"external": {"url": "http://x"}}}, "url"),
        ({"mode": "kuberay"}, "mode"),
        ({"podSecurityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"commonLabels": {"pdray/role": "router"}}, "pdray/role"),
        ({"networkPolicies": {"enabled": False}}, "networkPolicies"),
    ],
    ids=str,
)
def test_the_schema_refuses_typos_and_wrong_types(helm_name: str, values: dict[str, Any], word: str) -> None:
    error = render(values, helm_name=helm_name).error
    assert "schema" in error
    assert word in error


@HELMS
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"weights": RWO, "model": {"path": "/models/m"}, "roles": {"decode": {"replicas": 2}}},
            "ReadWriteOnce can be mounted on one node only, but roles.decode.replicas is 2",
        ),
        (
            {"weights": RWO, "model": {"path": "/models/m"}, "roles": {"decode": {"spread": "required"}}},
            "roles.decode.spread is required",
        ),
        ({"weights": {"source": "pvc"}}, "model.path must lie under weights.pvc.mountPath (/models)"),
        ({"weights": {"source": "hub"}}, "model.path must be a hub id"),
        ({"roles": {"decode": {"replicas": 0}}}, "this serves nothing"),
        ({"redis": {"mode": "external"}}, "needs redis.external.url"),
        ({"redis": {"mode": "none"}, "head": {"faultTolerance": {"enabled": True}}}, "redisAddress"),
        ({"roles": {"decode": {"rayResource": "pdray-prefill"}}}, "two roles have the same rayResource"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"rdma": {"enabled": True}, "transport": "tcp"}, "rdma needs transport mooncake"),
        ({"access": {"keys": [KEY], "existingSecret": "s"}}, "give existingSecret or keys, not both"),
        ({"tls": {"existingSecret": "t", "clientCaKey": "ca.crt"}}, "tls.clientSecret for probes"),
        ({"tls": {"clientCaKey": "ca.crt", "clientSecret": "c"}}, "tls.clientCaKey needs tls.existingSecret"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://r:1", "passwordKey": "p"}}},
            "redis.external.existingSecret, which is empty",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://r:1", "tls": {"existingSecret": "c"}}}},
            "begin with rediss://",
        ),
        ({"redis": SENTINELS | {"external": {"existingSecret": "r", "tls": {"certKey": "c"}}}}, "belong together"),
        (
            {"access": {"keys": [KEY]}, "monitoring": {"serviceMonitor": {"enabled": True}}},
            "monitoring.serviceMonitor.apiKey.existingSecret, a key of scope metrics",
        ),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "Prometheus operator's API"),
        ({"monitoring": {"podMonitor": {"enabled": True}}}, "Prometheus operator's API"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_with_its_reason(helm_name: str, values: dict[str, Any], message: str) -> None:
    error = render(values, helm_name=helm_name).error
    assert message in error.replace("\n", " "), error


def test_the_schema_knows_every_setting_that_the_chart_does_not_manage_in_one_place_each() -> None:
    kinds = {int: "integer", float: "number", bool: "boolean", str: "string", tuple[str, ...]: "array"}
    wanted: dict[str, dict[str, dict[str, str]]] = {"settings": {}, "live": {}}
    for section, section_type in typing.get_type_hints(ServeConfig).items():
        if not dataclasses.is_dataclass(section_type):
            continue
        for name, kind in typing.get_type_hints(section_type).items():
            if f"{section}.{name}" not in MANAGED:
                place = "live" if name in LIVE.get(section, ()) else "settings"
                wanted[place].setdefault(section, {})[name] = kinds[kind]
    properties = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    for place, sections in wanted.items():
        schema = properties[place]
        told = {s: {n: p["type"] for n, p in v["properties"].items()} for s, v in schema["properties"].items()}
        assert told == sections, place
        assert all(v["additionalProperties"] is False for v in (schema, *schema["properties"].values()))
    assert properties["live"]["properties"]["router"]["properties"]["policy"]["enum"] == list(PAIR_POLICIES)
    assert properties["settings"]["properties"]["admission"]["properties"]["order"]["enum"] == list(ORDERS)
