"""`pdray doctor`: each finding appears where its cause does, with what mends it, and only then."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from services.config import ServeConfig, load
from services.doctor import checks, stores, transport
from services.doctor.checks import Check, cpu_flags, to_json
from services.start.system import MOONCAKE_LIBRARIES, System
from tests.unit.test_transfer_choice import make_device


def config(**overrides: Any) -> ServeConfig:
    return load(overrides={name.replace("__", "."): value for name, value in overrides.items()}, environ={})


def levels(found: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in found}


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the machine that the checks see."""

    def use(**changes: Any) -> None:
        facts = {"os_name": "Linux", "python": (3, 11), "machine": "x86_64"}
        facts |= {"missing_libraries": (), "has_mooncake": True, **changes}
        for module in (checks, transport):
            monkeypatch.setattr(module, "this_system", lambda: System(**facts))

    return use


def test_another_system_is_an_error_with_the_way_out(system: Any) -> None:
    system(os_name="Darwin")
    (found,) = checks.check_platform(config())
    assert found.level == "error"
    assert "container" in found.fix


def test_missing_libraries_name_the_exact_command(system: Any) -> None:
    system(missing_libraries=tuple(MOONCAKE_LIBRARIES))
    (found,) = checks.check_libraries(config())
    assert found.level == "warning"
    assert found.fix == "apt-get install -y libibverbs1 librdmacm1 libnuma1"
    (demanded,) = checks.check_libraries(config(transfer__transport="mooncake"))
    assert demanded.level == "error"


@pytest.mark.parametrize(("name", "level"), [("auto", "warning"), ("tcp", "warning"), ("mooncake", "error")])
def test_a_mooncake_that_is_absent_is_an_error_only_where_it_was_asked_for(system: Any, name: str, level: str) -> None:
    system(has_mooncake=False)
    (found,) = transport.check_mooncake(config(transfer__transport=name))
    assert found.level == level
    assert "tcp" in found.fix


def test_a_transport_that_cannot_be_guarded_is_reported_with_its_reason(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    system()
    monkeypatch.setattr(transport, "probe", lambda _name: "the kernel refused the filter")
    (found,) = transport.check_mooncake(config())
    assert found.level == "warning"
    assert "the kernel refused the filter" in found.finding


def test_the_probe_tells_an_absent_transport_from_a_working_one() -> None:
    assert transport.probe("tcp") == ""
    assert "cannot be loaded" in transport.probe("no.such.module:Transport")


def test_rdma_devices_are_listed_and_demanded_only_by_the_rdma_wire(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", "4: ACTIVE")
    (found,) = transport.check_rdma(config(), tmp_path)
    assert (found.level, "mlx5_0" in found.finding) == ("note", True)
    for asked in ({"transfer__transport": "rdma"}, {"transfer__protocol": "rdma"}):
        (used,) = transport.check_rdma(config(**asked), tmp_path)
        assert used.level == "ok"
        (none,) = transport.check_rdma(config(**asked), tmp_path / "absent")
        assert (none.level, "no RDMA device" in none.finding) == ("error", True)


def test_the_choice_of_a_transport_is_told_with_the_reasons_against_faster_ones(system: Any, tmp_path: Path) -> None:
    system(has_mooncake=False)
    *_, auto = transport.check_transports(config(), tmp_path)
    assert auto.level == "ok"
    assert all(words in auto.finding for words in ("auto means tcp", "nvlink: KV lies in host", "rdma: this machine"))
    *_, refused = transport.check_transports(config(transfer__transport="rdma"), tmp_path)
    assert refused.level == "error"
    assert "no RDMA device" in refused.finding
    assert refused.fix == "--transport tcp, --allow-fallback"
    *_, lent = transport.check_transports(config(transfer__transport="rdma", transfer__allow_fallback=True), tmp_path)
    assert (lent.level, "tcp instead of rdma" in lent.finding) == ("warning", True)


@pytest.mark.parametrize(
    ("text", "dtype", "shown", "widening"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n", "bfloat16", "avx512_bf16, amx_bf16", None),
        ("flags\t\t: fpu avx2 fma\n", "float32", "avx2", "note"),
        ("flags\t\t: fpu avx2\n", "float32", "avx2", "warning"),
        ("processor : 0\n", "float32", "no AVX", "warning"),
    ],
)
def test_the_cpu_decides_what_dtype_auto_means(
    tmp_path: Path, text: str, dtype: str, shown: str, widening: str | None
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text, encoding="utf-8")
    found = checks.check_cpu(config(prefill=0, decode=0, mixed=1), file)
    assert dtype in found[0].finding
    assert shown in found[0].finding
    asked = checks.check_cpu(config(model__dtype="bfloat16", prefill=0, decode=0, mixed=1), file)
    assert levels(asked).get("cpu dtype") == widening


def test_flags_are_read_from_the_first_processor_only() -> None:
    assert cpu_flags("flags : a b\nflags : c\n") == {"a", "b"}
    assert cpu_flags("Features : asimd bf16\n") == {"asimd", "bf16"}
    assert cpu_flags("") == frozenset()


def test_more_workers_than_cores_are_told() -> None:
    assert "cpu share" in levels(checks.check_cpu(config(prefill=500, decode=500)))


def test_too_much_kv_for_the_memory_names_the_setting() -> None:
    enough = checks.check_memory(config(prefill=0, decode=0, mixed=1, engine__kv_memory_bytes=1 << 20))
    assert levels(enough)["memory"] == "ok"
    short = checks.check_memory(config(engine__kv_memory_bytes=1 << 50))
    assert short[0].level == "warning"
    assert "engine.kv_memory_bytes" in short[0].fix


def test_a_taken_port_is_an_error_that_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = checks.check_ports(
            config(router__port=number, router__grpc_port=0, router__serve_port=0, router__serve_grpc_port=0)
        )
    assert levels(found) == {f"port {number}": "error"}
    assert "--port" in found[0].fix


@pytest.mark.parametrize("kind", ["folder without config", "gguf that is absent", "unreadable card"])
def test_a_model_that_cannot_be_prepared_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("absent.gguf" if kind.startswith("gguf") else "")
    if kind == "unreadable card":
        (tmp_path / "pdray.json").write_text("{", encoding="utf-8")
    (found,) = checks.check_model(config(model__path=str(path)))
    assert found.level == "error"
    assert found.fix


def test_the_default_model_is_in_order(tmp_path: Path) -> None:
    (found,) = checks.check_model(config(model__cache_dir=str(tmp_path)))
    assert found.level == "note"
    assert "270 MB" in found.finding


def test_an_embedded_store_is_really_started() -> None:
    (found,) = stores.check_redis(config())
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("url", "level"),
    [("none", "note"), ("redis://:hidden@127.0.0.1:1/0", "warning"), ("smoke://x", "error")],
)
def test_a_redis_that_does_not_answer_is_told_without_its_password(url: str, level: str) -> None:
    (found,) = stores.check_redis(config(redis__url=url))
    assert found.level == level
    assert "hidden" not in found.finding + found.fix


def test_json_is_one_object_that_says_whether_serving_can_work() -> None:
    good, bad = Check("a", "warning", "x", "y"), Check("b", "error", "x", "y")
    assert json.loads(to_json([good]))["ok"] is True
    data = json.loads(to_json([good, bad]))
    assert data["ok"] is False
    assert data["checks"][1] == {"name": "b", "level": "error", "finding": "x", "fix": "y"}


def test_every_warning_and_error_on_this_machine_has_a_fix() -> None:
    for check in checks.run_checks(config(router__port=0, router__grpc_port=0)):
        assert (check.level in ("ok", "note")) or check.fix, check
