"""`pdray bench scenario`: which scenarios, how thoroughly, and where the results go."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.errors import ConfigError
from services.bench.scenarios.page import page
from services.bench.scenarios.runner import run_scenario
from services.bench.scenarios.scenario import FORMS, load_scenario, names


def scenario_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pdray bench scenario",
        description=(
            "Measure claims of this project against their baselines: each scenario starts both sides with "
            "`pdray serve`, loads them in turn, and says which figures moved as claimed. One JSON line for each."
        ),
    )
    add = made.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"names or files; default: {', '.join(names())}")
    add("--form", choices=tuple(FORMS), default="short", help="default: %(default)s; tiny only shows that it works")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of every server; repeatable")
    add("--output", type=Path, help="file that the JSON lines are added to")
    add("--page", type=Path, help="write docs from all lines of --output (or of this run)")
    add("--only-page", action="store_true", help="measure nothing: write --page from --output")
    add("--list", action="store_true", help="names and claims")
    return made


def main(arguments: Sequence[str], out: Console, err: Console) -> int:
    """The exit code: 0 where all was measured, whatever was found. Raises ConfigError."""
    options = scenario_parser().parse_args(arguments)
    if options.only_page and (options.page is None or options.output is None):
        raise ConfigError("--only-page needs --page and --output")
    scenarios = [load_scenario(name) for name in options.scenarios or names()]
    if options.list:
        for scenario in scenarios:
            out.print(f"[bold]{escape(scenario.name)}[/]: {escape(' '.join(scenario.claim.split()))}", highlight=False)
        return 0
    began_s = time.monotonic()

    def tell(line: str) -> None:
        err.print(f"[{time.monotonic() - began_s:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    results: list[dict[str, Any]] = []
    for scenario in [] if options.only_page else scenarios:
        with _unwinding_on_sigterm():
            result = run_scenario(scenario, options.form, _settings(options.set), tell)
        results.append(result)
        out.print(_table(result))
        out.file.write(json.dumps(result, allow_nan=False) + "\n")
        out.file.flush()
        if options.output is not None:
            _add(options.output, result)
    if options.page is not None:
        lines = results if options.output is None else _read(options.output)
        _write(options.page, page(lines))
        err.print(f"saved: {options.page}", markup=False, highlight=False, soft_wrap=True)
    return 0


@contextlib.contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the servers too, as Ctrl-C does: they have sessions of their own."""

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {pair}: give it as KEY=VALUE")
        found[key] = value
    return found


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=escape(result["title"]), title_justify="left")
    for name in ("load", "figure", result["baseline"], result["candidate"], "change", "95 %", "expected", ""):
        table.add_column(name)
    for f in result["findings"]:
        change = "n/a" if f["change"] is None else f"{f['change']:+.0%}"
        interval = "n/a" if f["low"] is None else f"{f['low']:+.0%} to {f['high']:+.0%}"
        values = ["n/a" if x is None else f"{x:.4g}" for x in (f["baseline"], f["candidate"])]
        table.add_row(escape(f["case"]), f["metric"], *values, change, interval, f["expected"], f["verdict"])
    return table


def _add(path: Path, result: dict[str, Any]) -> None:
    """One line for each scenario: the newest."""
    kept = [line for line in (_read(path) if path.exists() else []) if line["scenario"] != result["scenario"]]
    _write(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in [*kept, result]))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        found = [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--output {path}: {exc}") from None
    return sorted((x for x in found if x.get("benchmark") == "scenario"), key=lambda x: str(x["scenario"]))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc}") from None
