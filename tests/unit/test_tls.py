"""TLS of both ports by a certificate made here, with and without certificates of clients."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvstore.errors import ConfigError
from services.access_config import TlsConfig
from services.protocol.client import AsyncPdrayClient, Tls
from services.protocol.errors import RequestError
from tests.certificates import Pair, make_pair
from tests.fronts import FakeCore, make_core, running


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    return make_core(tmp_path)


def with_tls(core: FakeCore, pair: Pair, client_ca: Path | None = None) -> None:
    tls = TlsConfig(cert_file=str(pair.cert), key_file=str(pair.key), client_ca_file=str(client_ca or ""))
    core.config = replace(core.config, tls=tls)


async def test_both_ports_speak_tls_alone(core: FakeCore, tmp_path: Path) -> None:
    ca = make_pair(tmp_path, "ca")
    with_tls(core, make_pair(tmp_path, "server", ca))
    async with running(core) as fronts:
        context = ssl.create_default_context(cafile=str(ca.cert))
        base = f"127.0.0.1:{fronts.http_port}"
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            reply = await client.post(f"https://{base}/v1/completions", json={"prompt": "x"})
            assert reply.json()["choices"][0]["text"] == "Hello world"
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://{base}/health")
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"https://{base}/health")
        address = f"127.0.0.1:{fronts.grpc_port}"
        async with AsyncPdrayClient(address, tls=Tls(ca=ca.cert.read_bytes())) as grpc_client:
            assert "".join([p.text async for p in grpc_client.generate("x")]) == "Hello world"
        async with AsyncPdrayClient(address) as plain:
            with pytest.raises(RequestError):
                await plain.model()


async def test_a_client_without_a_certificate_is_turned_away_where_one_is_wanted(
    core: FakeCore, tmp_path: Path
) -> None:
    ca = make_pair(tmp_path, "ca")
    own = make_pair(tmp_path, "client", ca)
    with_tls(core, make_pair(tmp_path, "server", ca), ca.cert)
    async with running(core) as fronts:
        url = f"https://127.0.0.1:{fronts.http_port}/health"
        context = ssl.create_default_context(cafile=str(ca.cert))
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url)
        context = ssl.create_default_context(cafile=str(ca.cert))
        context.load_cert_chain(own.cert, own.key)
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        address, ca_pem = f"127.0.0.1:{fronts.grpc_port}", ca.cert.read_bytes()
        async with AsyncPdrayClient(address, tls=Tls(ca=ca_pem)) as without:
            with pytest.raises(RequestError):
                await without.model()
        tls = Tls(ca=ca_pem, cert=own.cert.read_bytes(), key=own.key.read_bytes())
        async with AsyncPdrayClient(address, tls=tls) as known:
            assert (await known.model()).id == "tiny"


async def test_files_that_cannot_be_used_stop_the_start(core: FakeCore, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    other = make_pair(tmp_path, "other")
    for wrong in (Pair(tmp_path / "none", pair.key), Pair(pair.cert, other.key), Pair(pair.key, pair.key)):
        with_tls(core, wrong)
        with pytest.raises(ConfigError, match=r"tls\.cert_file"):
            async with running(core):
                pass


@pytest.mark.parametrize(
    ("settings", "told"), [({"cert_file": "x"}, "tls.key_file"), ({"client_ca_file": "x"}, "tls.client_ca_file")]
)
def test_half_a_setting_is_refused(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TlsConfig(**settings)
