"""Which kernels are chosen, and what happens where they cannot be compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import ServeConfig
from services.doctor.checks import check_kernels
from services.engine.native import build
from services.engine.native.build import KINDS, NoKernels, choose, library_for
from services.engine_config import KERNELS, EngineConfig

AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def test_the_best_kind_that_the_cpu_has_is_taken() -> None:
    assert choose("auto", AVX2).name == "avx2"
    assert choose("auto", AVX512).name == "avx512"
    assert choose("auto", AVX512 | {"avx512_bf16"}).name == "avx512_bf16"
    assert choose("auto", AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}).name == "amx"
    assert choose("avx512", AVX512 | {"avx512_bf16"}).name == "avx512"
    assert choose("avx2", AVX512).name == "avx2"


def test_a_kind_that_the_cpu_lacks_is_refused_with_what_it_can_run() -> None:
    with pytest.raises(NoKernels, match=r"no amx; it can run: avx512, avx2 \(engine\.kernels\)"):
        choose("amx", AVX512)
    with pytest.raises(NoKernels, match="neither AVX-512 nor AVX2"):
        choose("auto", frozenset({"avx2"}))  # without fused multiply-add


def test_the_setting_names_every_kind() -> None:
    assert set(KERNELS) == {"auto", "off", *(kind.name for kind in KINDS)}


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernels, match=r"apt-get install g\+\+"):
        library_for(KINDS[-1], tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    broken = replace(KINDS[-1], compiler_flags=("-DSTEP=}",))
    with pytest.raises(NoKernels, match=r"could not compile the kernels: .*error"):
        library_for(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "file").write_text("")
    with pytest.raises(NoKernels, match=r"could not be compiled into .*file/kernels.*PDRAY_HOME"):
        library_for(KINDS[-1], tmp_path / "file" / "kernels")


def test_two_that_compile_at_once_end_with_one_whole_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "kernels.cpp").write_text('extern "C" int answer() { return 42; }\n')
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    kind = replace(KINDS[-1], compiler_flags=())
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: library_for(kind, tmp_path / "made"), range(3)))
    assert len(paths) == 1
    assert [p.suffix for p in (tmp_path / "made").iterdir()] == [".so"]
    (tmp_path / "sources" / "kernels.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert library_for(kind, tmp_path / "made") not in paths  # other sources, another library


def test_the_doctor_tells_which_path_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    (off,) = check_kernels(ServeConfig(engine=EngineConfig(kernels="off")))
    assert off.level == "note"
    (old,) = check_kernels(ServeConfig(), frozenset({"avx2"}))
    assert (old.level, "neither AVX-512 nor AVX2" in old.finding) == ("warning", True)
    (wrong,) = check_kernels(ServeConfig(engine=EngineConfig(kernels="amx")), AVX512)
    assert wrong.level == "error"
