"""The report: one file that needs nothing else, with what the results say, and pictures where they hold enough."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.bench.load.main import main
from services.bench.load.options import parser
from services.bench.load.run import bench
from services.bench.load.show import detailed
from services.bench.load.sweep.command import sweep_parser
from services.bench.load.sweep.run import sweep
from tests.unit.virtual_net import run_over_sockets, served

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow  # matplotlib makes its list of fonts at its first use on a machine

SMALL = ("--random-input-len", "20", "--random-output-len", "4", "--disable-tqdm")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """A run with a failure, a hang-up and a cap, a run without details, and a sweep."""

    async def made() -> list[dict[str, Any]]:
        clock, quiet = asyncio.get_running_loop().time, Console(quiet=True)
        async with served(slots=2, ttft_ms=100, itl_ms=20) as (server, url):
            server.script = [{}] * 6 + [{"end": "error_event"}] + [{}] * 3
            base = ("--base-url", url, *SMALL, "--goodput", "ttft:500")
            cancels = ("--request-cancellation-rate", "10", "--request-cancellation-delay", "0.05")
            options = parser().parse_args(
                [*base, "--request-rate", "8", "--num-prompts", "20", "--label", "<first & only>", *cancels]
            )
            result, records = await bench(options, quiet, clock)
            plain, _ = await bench(
                parser().parse_args([*base, "--request-rate", "4", "--num-prompts", "5"]), quiet, clock
            )
            server.script = []
            searched = await sweep(
                sweep_parser().parse_args([*base, "--probe-s", "3", "--min-requests", "5", "--repeats", "1"]),
                quiet,
                clock,
            )
            return [detailed(result, records), plain, searched]

    return run_over_sockets(made())  # type: ignore[no-any-return]


def saved(folder: Path, results: list[dict[str, Any]]) -> str:
    file = folder / "results.json"
    file.write_text("\n".join(json.dumps(result) for result in results))
    return str(file)


def test_the_page_needs_nothing_else_and_shows_all_pictures(tmp_path: Path, results: list[dict[str, Any]]) -> None:
    page, pictures = tmp_path / "out" / "r.html", tmp_path / "png"
    assert main(["report", saved(tmp_path, results), "--output", str(page), "--png-dir", str(pictures)]) == 0
    text = page.read_text()
    assert sorted(p.name for p in pictures.iterdir()) == [
        "goodput-against-rate.png", "latency.png", "timeline-first-only.png",
    ]  # fmt: skip
    assert all(p.read_bytes().startswith(PNG) for p in pictures.iterdir())
    assert text.count("data:image/png;base64,") == 3
    assert "&lt;first &amp; only&gt;" in text
    assert "<first" not in text
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert all(link.startswith("data:") for link in links)
    assert "<script" not in text
    assert "http" not in re.sub(r"&#34;base_url&#34;: &#34;http://127[^&]*", "", text.replace("http_", ""))
    for words in ("time to first token", "requests per second", "not", "90% of the requests keep ttft up to 500 ms"):
        assert words in text


def test_a_run_without_details_has_numbers_only(tmp_path: Path, results: list[dict[str, Any]]) -> None:
    page = tmp_path / "r.html"
    bare = {**results[1], "request_goodput": None}
    assert main(["report", saved(tmp_path, [bare]), "--output", str(page)]) == 0
    assert "<img" not in page.read_text()
    assert "run 1" in page.read_text()


def test_an_invalid_run_says_so_on_the_page(tmp_path: Path, results: list[dict[str, Any]]) -> None:
    bad = {**results[1], "valid": False, "invalid_reasons": ["the client sent requests late"]}
    page = tmp_path / "r.html"
    assert main(["report", saved(tmp_path, [bad]), "--output", str(page)]) == 0
    assert "Invalid: the client sent requests late" in page.read_text()


def test_a_file_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("{}\n[]\n")
    assert main(["report", str(tmp_path / "empty")]) == 1
    assert "holds no result" in capsys.readouterr().err


def test_without_matplotlib_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: list[dict[str, Any]]
) -> None:
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "services.bench.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["report", saved(tmp_path, results), "--output", str(tmp_path / "r.html")]) == 1
    assert "pdray[bench]" in capsys.readouterr().err
