"""What the chart renders is valid: for Helm 3 and 4, Kubernetes 1.27 to 1.37, KubeRay's RayService and Ray Serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import ValidationError

from tests.deploy import charts
from tests.deploy.charts import FULL_VALUES, HELMS, KUBERNETES, MODES, QUICK_KUBERNETES, rendered, run_helm
from tests.deploy.serving import check_serve_config


@HELMS
@pytest.mark.parametrize("file", [None, FULL_VALUES], ids=["default", "full"])
def test_lint_is_content(helm_name: str, file: Path | None) -> None:
    arguments = ["lint", "--strict", str(charts.CHART)]
    if file is not None:  # lint cannot be told which APIs a cluster has
        monitors = "monitoring.serviceMonitor.enabled=false,monitoring.podMonitor.enabled=false"
        arguments += ["--values", str(file), "--set", monitors]
    done = run_helm(helm_name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@HELMS
@MODES
@pytest.mark.parametrize("file", [None, FULL_VALUES], ids=["default", "full"])
def test_objects_are_valid_on_the_supported_versions_of_kubernetes(
    helm_name: str, mode: str, file: Path | None
) -> None:
    for version in QUICK_KUBERNETES:
        outcome = rendered(file=file, helm_name=helm_name, apis=charts.apis_for(mode), kubernetes=version)
        charts.check_kubernetes(outcome.objects, version)


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_are_valid_on_every_supported_version_of_kubernetes(mode: str, version: str) -> None:
    for file in (None, FULL_VALUES):
        outcome = rendered(file=file, apis=charts.apis_for(mode), kubernetes=version)
        charts.check_kubernetes(outcome.objects, version)


@pytest.mark.parametrize("file", [None, FULL_VALUES], ids=["default", "full"])
def test_the_rayservice_is_what_kuberay_defines(file: Path | None) -> None:
    outcome = rendered(file=file, apis=charts.ALL_APIS)
    assert any(o["kind"] == "RayService" for o in outcome.objects)
    charts.check_rayservice(outcome.objects)


def test_the_schemas_do_see_a_wrong_field() -> None:
    outcome = rendered()
    service = outcome.one("RayService")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(ValidationError, match="rayStartParam"):
        charts.check_rayservice(outcome.objects)
    _, _, spec = next(charts.pods(outcome.objects))
    spec["containers"][0]["resource"] = {}
    with pytest.raises(ValidationError, match="resource"):
        charts.check_kubernetes(outcome.objects, "1.37")


@HELMS
@MODES
@pytest.mark.parametrize("file", [None, FULL_VALUES], ids=["default", "full"])
def test_serve_and_pdray_accept_the_rendered_configuration(helm_name: str, mode: str, file: Path | None) -> None:
    outcome = rendered(file=file, helm_name=helm_name, apis=charts.apis_for(mode))
    config = outcome.serve_config()
    deployments = check_serve_config(config)
    expected = {"router", "prefill", "decode", "mixed"} if file else {"router", "prefill", "decode"}
    assert deployments == expected
    if file:
        args = config["applications"][0]["args"]
        assert int(args["engine.kv_memory_bytes"]) == 4 << 30
        assert {d["name"]: d["num_replicas"] for d in config["applications"][0]["deployments"]} == {
            "router": 2,
            "prefill": 4,
            "decode": 4,
            "mixed": 1,
        }


def test_both_helms_render_the_same() -> None:
    for mode in ("rayservice", "plain"):
        pair = [
            rendered(
                {"secrets": {"existingSecret": "keys"}}, helm_name=name, file=FULL_VALUES, apis=charts.apis_for(mode)
            )
            for name in ("helm3", "helm4")
        ]
        assert pair[0] == pair[1]


@HELMS
def test_without_kuberay_the_chart_runs_ray_itself_and_says_so_where_it_was_told_not_to(helm_name: str) -> None:
    plain = rendered(helm_name=helm_name, apis=())
    assert {o["kind"] for o in plain.objects} >= {"Deployment", "StatefulSet", "Service", "Secret"}
    assert not [o for o in plain.objects if o["kind"] == "RayService"]
    refused = charts.render({"mode": "rayservice"}, helm_name=helm_name, apis=())
    assert "Install KubeRay, or set mode: plain" in refused.error
    assert not charts.render({"mode": "plain"}, helm_name=helm_name).error


@pytest.mark.parametrize(
    ("values", "told", "silent"),
    [
        ("mode=plain", ["curl http://", "Whoever reaches the router", "not encrypted"], ["Bearer", "RDMA"]),
        (
            "mode=plain,access.existingSecret=k,tls.existingSecret=t,ingress.enabled=true",
            ["curl --insecure https://", "Authorization: Bearer $KEY", "without access.testKey", "BackendTLSPolicy"],
            ["Whoever", "not encrypted", "--cert"],
        ),
    ],
    ids=["default", "guarded"],
)
def test_the_notes_begin_with_a_request_that_fits_the_values(values: str, told: list[str], silent: list[str]) -> None:
    done = run_helm("helm4", "install", "r", str(charts.CHART), "--dry-run=client", "--set", values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("\nNOTES:\n")[1]
    assert all(words in notes for words in told), notes
    assert not any(words in notes for words in silent), notes
