"""The Serve configurations that ship with the project."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.app import AppArgs, config_from
from tests.deploy.serving import check_serve_config

FOLDER = Path(__file__).parents[2] / "deploy" / "serve"


def test_the_files_are_known() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"cpu-1p1d.yaml", "cpu-2p2d.yaml", "gpu-rdma-4p4d.yaml"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_serve_and_pdray_accept_each_file(file: Path) -> None:
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    deployments = check_serve_config(config)
    assert deployments == {"router", "prefill", "decode"}
    args = config["applications"][0]["args"]
    assert (args["port"], args["grpc_port"]) == (8000, 9000)
    assert (config["http_options"]["port"], config["grpc_options"]["port"]) == (8001, 9001)
    assert not {"secret", "redis_url"} & set(args), "Serve logs arguments"


@pytest.mark.parametrize("name", ["cpu-1p1d", "cpu-2p2d", "gpu-rdma-4p4d"])
def test_the_name_tells_the_counts(name: str) -> None:
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    counts = {d["name"]: d.get("num_replicas", 1) for d in config["applications"][0]["deployments"]}
    assert f"{counts['prefill']}p{counts['decode']}d" == name.rpartition("-")[2]


def test_the_file_for_rdma_takes_one_gpu_for_each_worker_and_no_other_wire() -> None:
    config = yaml.safe_load((FOLDER / "gpu-rdma-4p4d.yaml").read_text(encoding="utf-8"))
    (app,) = config["applications"]
    gpus = {d["name"]: d["ray_actor_options"].get("num_gpus", 0) for d in app["deployments"]}
    assert gpus == {"router": 0, "prefill": 1, "decode": 1}
    transfer = config_from(AppArgs(**app["args"])).transfer
    assert (transfer.protocol, transfer.allow_fallback) == ("rdma", False)
