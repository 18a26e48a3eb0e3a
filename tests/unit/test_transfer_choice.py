"""Which transport a worker gets: what was asked for by name is never replaced in silence."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TransferError, TransportUnavailable
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.tensors import KVMemory
from kvstore.transfer import messages as m
from kvstore.transfer import options
from kvstore.transfer.base import Peer, Region
from kvstore.transfer.client import TransferClient
from kvstore.transfer.devices import rdma_devices, why_no_rdma
from kvstore.transfer.options import TransportOptions, load_spares, load_transport
from kvstore.transfer.several import Several, first_common
from services.config import TransferConfig, set_mooncake_environment

OPTIONS = TransportOptions(secret="for tests")
GROUP = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
GEOMETRY = KVGeometry(groups=(GROUP,), num_blocks=(4,))


def make_device(root: Path, name: str, state: str) -> None:
    port = root / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n", encoding="utf-8")


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose kernel lists the RDMA devices of this folder, which has none."""
    from kvstore.transfer import rdma

    monkeypatch.setattr(rdma, "why_no_rdma", lambda wanted: why_no_rdma(wanted, tmp_path))
    monkeypatch.setattr(options, "rdma_devices", lambda: rdma_devices(tmp_path))
    return tmp_path


def test_devices_are_those_of_the_kernel_with_the_state_of_their_ports(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "absent") == {}
    make_device(tmp_path, "mlx5_0", "4: ACTIVE")
    make_device(tmp_path, "mlx5_1", "1: DOWN")
    assert rdma_devices(tmp_path) == {"mlx5_0": True, "mlx5_1": False}


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("", ""),
        ("mlx5_0", ""),
        ("mlx5_0,mlx5_1", ""),
        ("mlx5_1", "no port of mlx5_1 is active"),
        ("mlx5_0, mlx5_7", "there is no RDMA device mlx5_7"),
    ],
)
def test_a_reason_names_the_device_that_is_missing_or_down(tmp_path: Path, wanted: str, reason: str) -> None:
    make_device(tmp_path, "mlx5_0", "4: ACTIVE")
    make_device(tmp_path, "mlx5_1", "1: DOWN")
    assert why_no_rdma(wanted, tmp_path).startswith(reason)
    assert bool(why_no_rdma(wanted, tmp_path)) == bool(reason)


@pytest.mark.parametrize(("name", "reason"), [("rdma", "no RDMA device"), ("nvlink", "host memory")])
def test_what_cannot_run_here_is_refused_with_its_reason_and_the_ways_out(
    no_devices: Path, name: str, reason: str
) -> None:
    with pytest.raises(TransportUnavailable) as caught:
        load_transport(name, OPTIONS)
    for words in (f"transport {name} cannot be used", reason, "--allow-fallback", "--transport"):
        assert words in str(caught.value)


@pytest.mark.parametrize(("name", "reasons"), [("rdma", ["rdma: this machine"]), ("nvlink", ["nvlink: KV", "rdma: "])])
def test_a_fallback_that_was_allowed_is_told_with_every_reason(
    no_devices: Path, monkeypatch: pytest.MonkeyPatch, name: str, reasons: list[str]
) -> None:
    monkeypatch.setitem(options.BUILT_IN, "mooncake", "tests.unit.test_transfer_choice:Broken")
    transport, note = load_transport(name, OPTIONS, allow_fallback=True)
    assert transport.name == "tcp"
    assert note.startswith(f"tcp instead of {name} (--allow-fallback): ")
    assert all(words in note for words in [*reasons, "mooncake: broken for the test"])


class Broken:
    name = "mooncake"

    def __init__(self, _options: TransportOptions) -> None:
        pass

    def check(self) -> None:
        raise TransportUnavailable("broken for the test")


def test_auto_leaves_rdma_devices_alone_and_says_so(no_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options.BUILT_IN, "mooncake", "kvstore.transfer.local:LocalTransport")
    assert load_transport("auto", OPTIONS)[1] == ""
    make_device(no_devices, "mlx5_0", "4: ACTIVE")
    _, note = load_transport("auto", OPTIONS)
    assert "mlx5_0 are not used" in note


def test_the_last_of_the_order_and_other_classes_have_nothing_to_fall_back_to() -> None:
    for name in ("tcp", "no.such.module:Transport"):
        with pytest.raises(TransportUnavailable) as caught:
            load_transport(name, TransportOptions(), allow_fallback=True)
        assert "--allow-fallback" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "auto"),
        ({"protocol": "rdma"}, "rdma"),
        ({"transport": "mooncake", "protocol": "rdma"}, "rdma"),
        ({"transport": "rdma"}, "rdma"),
        ({"transport": "tcp", "protocol": "rdma"}, "tcp"),
    ],
)
def test_the_wire_of_mooncake_is_a_transport_of_its_own(settings: dict[str, Any], wanted: str) -> None:
    assert TransferConfig(**settings).wanted == wanted


def test_mooncakes_own_settings_reach_its_environment() -> None:
    environ: dict[str, str] = {}
    pairs = ("MC_GID_INDEX=3", "MC_CUSTOM_TOPO_JSON=/etc/topology.json")
    set_mooncake_environment(TransferConfig(transport="rdma", mooncake_env=pairs), environ)
    assert (environ["MC_GID_INDEX"], environ["MC_CUSTOM_TOPO_JSON"]) == ("3", "/etc/topology.json")
    assert "MC_FORCE_TCP" not in environ


@pytest.mark.parametrize(
    ("name", "chosen", "allow_fallback", "spares"),
    [
        ("auto", "mooncake", False, ["tcp"]),
        ("auto", "tcp", False, []),
        ("mooncake", "mooncake", False, []),
        ("rdma", "rdma", True, ["tcp"]),
        ("no.such:Class", "own", True, []),
    ],
)
def test_tcp_runs_beside_what_was_not_asked_for_by_name(
    name: str, chosen: str, allow_fallback: bool, spares: list[str]
) -> None:
    found = load_spares(name, chosen, OPTIONS, allow_fallback=allow_fallback)
    assert [transport.name for transport in found] == spares


def test_a_pair_takes_the_first_of_the_writers_list() -> None:
    assert first_common(["rdma", "mooncake", "tcp"], ["tcp", "mooncake"]) == "mooncake"
    assert first_common(["rdma"], ["tcp"]) == ""


def test_a_segment_is_reached_by_the_transport_that_wrote_it() -> None:
    """And a reader listens with the one that it is told."""
    memory = bytearray(64)
    region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
    several = Several([load_transport("local", OPTIONS)[0], load_transport("tcp", OPTIONS)[0]])
    peer = Peer("P", "p")
    for name in ("tcp", "local"):
        listener = several.named(name).listen(region, peer)
        channel = several.connect(region, peer, listener.segment)
        assert name in type(channel).__name__.lower()
        channel.close()
        listener.close()
    with pytest.raises(TransferError, match="transport 'rdma' does not run here, only local, tcp"):
        several.named("rdma")


async def start(**changes: Any) -> m.Started:
    memory, client = KVMemory.create(GEOMETRY), TransferClient()
    fields: dict[str, Any] = {
        "geometry": GEOMETRY.to_dict(), "transport": "rdma", "protocol": "tcp", "device": "no_such_device",
        "host": "127.0.0.1", "secret": "s", "digests": True, "layerwise": True, "max_outstanding": 4,
        "fence_after_ms": 1000, "throttle_bytes_per_s": 0,
    }  # fmt: skip
    try:
        return await client.start(memory.fd, -1, m.Start(**fields | changes), lambda _: None, lambda _: None)
    finally:
        await client.stop()
        memory.close()


async def test_a_real_transfer_process_refuses_rdma_here_or_falls_back_when_it_may() -> None:
    with pytest.raises(TransportUnavailable, match="transport rdma cannot be used"):
        await start()
    started = await start(allow_fallback=True)
    assert started.transport in ("mooncake", "tcp")
    assert started.note.startswith(f"{started.transport} instead of rdma (--allow-fallback)")
