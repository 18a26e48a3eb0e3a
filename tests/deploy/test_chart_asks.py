"""The chart's programs that ask the router, against its real fronts: with TLS, client certificates and keys."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.access_config import TlsConfig
from tests.access import with_keys
from tests.certificates import Pair, make_pair
from tests.deploy.charts import CHART
from tests.fronts import FakeCore, make_core, running

FILES = CHART / "files"


def mounted(folder: Path, pair: Pair) -> Path:
    """A folder as a mounted Secret of type kubernetes.io/tls is."""
    folder.mkdir()
    (folder / "tls.crt").write_bytes(pair.cert.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())
    return folder


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    """A router that wants keys and certificates of clients."""
    core = with_keys(make_core(tmp_path), tmp_path)
    ca = make_pair(tmp_path, "ca")
    server = mounted(tmp_path / "server", make_pair(tmp_path, "server-pair", ca))
    mounted(tmp_path / "client", make_pair(tmp_path, "client-pair", ca))
    mounted(tmp_path / "stranger", make_pair(tmp_path, "stranger-pair"))
    tls = TlsConfig(cert_file=f"{server}/tls.crt", key_file=f"{server}/tls.key", client_ca_file=str(ca.cert))
    core.config = replace(core.config, tls=tls)
    return core


async def run(script: str, *arguments: str, key: str = "") -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(FILES / script),
        *arguments,
        env={"PDRAY_API_KEY": key} if key else {},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, output.decode()


async def test_the_probe_is_let_in_by_its_certificate_and_believes_no_other_server(
    core: FakeCore, tmp_path: Path
) -> None:
    async with running(core) as fronts:
        url = f"https://127.0.0.1:{fronts.http_port}/ready"
        own, client = str(tmp_path / "server" / "tls.crt"), str(tmp_path / "client")
        assert await run("ask_ready.py", url, own, client) == (0, "")
        code, output = await run("ask_ready.py", url, own, str(tmp_path / "stranger"))
        assert (code, output.startswith(url)) == (1, True)
        code, output = await run("ask_ready.py", url, str(tmp_path / "client" / "tls.crt"), client)
        assert code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in output
        core.not_ready = "no workers"
        code, output = await run("ask_ready.py", url, own, client)
        assert code == 1
        assert "503" in output


async def test_helm_test_asks_with_its_key_and_without_one_says_that_keys_are_wanted(
    core: FakeCore, tmp_path: Path
) -> None:
    async with running(core) as fronts:
        there = f"https://127.0.0.1:{fronts.http_port}", str(tmp_path / "server" / "tls.crt"), str(tmp_path / "client")
        code, output = await run("ask.py", *there, key="alice-key")
        assert (code, '"choices"' in output) == (0, True), output
        code, output = await run("ask.py", *there)
        assert (code, "asks for an API key" in output) == (0, True), output
        for wrong, status in (("nobody-key", "401"), ("probe-key", "403")):
            code, output = await run("ask.py", *there, key=wrong)
            assert (code, f"HTTP {status}" in output) == (1, True), output
