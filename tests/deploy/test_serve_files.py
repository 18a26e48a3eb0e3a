"""The Serve configurations that ship with the project."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.serving import check_serve_config

FOLDER = Path(__file__).parents[2] / "deploy" / "serve"


def test_the_files_are_known() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"cpu-1p1d.yaml", "cpu-2p2d.yaml"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_serve_and_pdray_accept_each_file(file: Path) -> None:
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    deployments = check_serve_config(config)
    assert deployments == {"router", "prefill", "decode"}
    args = config["applications"][0]["args"]
    assert (args["port"], args["grpc_port"]) == (8000, 9000)
    assert (config["http_options"]["port"], config["grpc_options"]["port"]) == (8001, 9001)
    assert not {"secret", "redis_url"} & set(args), "Serve logs arguments"
