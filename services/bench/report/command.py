"""`pdray bench report`: saved results to a page, and to PNG files where they are wanted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvstore.errors import ConfigError

MAX_TIMELINES = 6


def report_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pdray bench report",
        description=(
            "Draw saved results: one HTML file that needs nothing else, and PNG files. Timelines and latency curves "
            "need runs saved with --save-detailed; goodput against rate needs sweeps, or runs with --goodput."
        ),
    )
    made.add_argument("files", type=Path, nargs="+", help="results of `pdray bench` or `pdray bench sweep`")
    made.add_argument("--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    made.add_argument("--png-dir", type=Path, help="folder for the pictures as files, too")
    made.add_argument("--title", default="pdray bench")
    return made


def main(arguments: Sequence[str], err: Console) -> int:
    """The exit code. Raises ConfigError for files without results, or where matplotlib is missing."""
    options = report_parser().parse_args(arguments)
    try:
        from services.bench.report import figures
    except ImportError as exc:
        raise ConfigError(f"pdray bench report draws with matplotlib: pip install 'pdray[bench]' ({exc})") from None
    from services.bench.report.page import page

    runs, sweeps = read_results(options.files)
    named = [(figures.name_of(run, i), run) for i, run in enumerate(runs)]
    drawn = {
        "Latency": figures.latency_cdf(runs),
        "Goodput against rate": figures.goodput(runs, sweeps),
        **{f"Timeline: {name}": figures.timeline(run) for name, run in named[:MAX_TIMELINES]},
    }
    pictures = {name: figures.png(figure) for name, figure in drawn.items() if figure is not None}
    named_sweeps = [(str(s.get("label") or f"sweep {i + 1}"), s) for i, s in enumerate(sweeps)]
    _write(options.output, page(options.title, named, named_sweeps, pictures).encode(), err)
    if options.png_dir is not None:
        for name, data in pictures.items():
            _write(options.png_dir / f"{_file_name(name)}.png", data, err)
    return 0


def read_results(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs and sweeps, in the order of the files. Raises ConfigError where a file holds neither."""
    runs: list[dict[str, Any]] = []
    sweeps: list[dict[str, Any]] = []
    for path in files:
        found = [data for line in _lines(path) if (data := _parsed(line)) is not None]
        these_sweeps = [x for x in found if x.get("benchmark") == "sweep"]
        these_runs = [x for x in found if "completed" in x]
        if not these_runs and not these_sweeps:
            raise ConfigError(f"{path} holds no result of pdray bench")
        runs += these_runs
        sweeps += these_sweeps
    return runs, sweeps


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}") from None


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _file_name(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _write(path: Path, data: bytes, err: Console) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc}") from None
    err.print(f"saved: {path}", markup=False, highlight=False, soft_wrap=True)
