"""A transport that this machine does not have: refused with its reason, or replaced where that is allowed, and told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvstore.transfer.devices import rdma_devices
from tests.integration.rig import Cluster

pytestmark = pytest.mark.skipif(bool(rdma_devices()), reason="this machine has RDMA devices")


def test_serve_refuses_rdma_before_it_starts_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "--transport", "rdma", "--port", "0", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    for words in ("transport rdma cannot be used", "no RDMA device", "--allow-fallback"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_refuses_rdma_and_says_why(tiny_model_folder: Path) -> None:
    command = [sys.executable, "-m", "services.prefill", "--model", str(tiny_model_folder)]
    environment = os.environ | {"PDRAY_SECRET": "s", "PDRAY_TRANSFER__TRANSPORT": "rdma"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode != 0
    assert "transport rdma cannot be used" in done.stdout + done.stderr


@pytest.mark.slow
async def test_a_pair_moves_kv_by_what_both_have(tiny_model_folder: Path, tmp_path: Path) -> None:
    only_tcp = {"decode-0": {"transfer.transport": "tcp"}}
    cluster = Cluster(tmp_path, tiny_model_folder, worker_settings=only_tcp, settings={"transfer.transport": "auto"})
    await cluster.start()
    try:
        workers = {w["worker_id"]: w["transport"] for w in (await cluster.cluster())["workers"]}
        (pair,) = (await cluster.cluster())["pairs"]
        assert workers["decode-0"] == pair["transport"] == "tcp"
        reply = cluster.complete([5, 6, 7], max_tokens=4)
        assert reply.status_code == 200
        shown = await cluster.debug(reply.headers["x-request-id"])
        assert shown["transport"] == "tcp"
    finally:
        await cluster.stop()


@pytest.mark.slow
async def test_an_allowed_fallback_serves_and_every_pair_tells_of_it(tiny_model_folder: Path, tmp_path: Path) -> None:
    settings = {"transfer.transport": "rdma", "transfer.allow_fallback": True}
    cluster = Cluster(tmp_path, tiny_model_folder, settings=settings)
    await cluster.start()
    try:
        async with httpx.AsyncClient() as client:
            (pair,) = (await cluster.cluster(client))["pairs"]
        assert pair["transport"] in ("mooncake", "tcp")
        assert pair["note"].startswith(f"{pair['transport']} instead of rdma (--allow-fallback)")
        assert cluster.complete([5, 6, 7], max_tokens=4).status_code == 200
    finally:
        await cluster.stop()
