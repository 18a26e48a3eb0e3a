"""`pdray bench …` and its subcommands: from arguments to output and exit code.

Exit codes: 0 a valid run, 1 it could not be done, 2 wrong arguments, 3 an invalid run (its result is printed),
130 Ctrl-C before the run began.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.errors import ConfigError
from services.bench.load.compare import Comparison, compare, read_runs
from services.bench.load.options import compare_parser, parser
from services.bench.load.run import bench
from services.bench.load.show import default_name, detailed, json_line, save, show
from services.bench.load.sweep.command import show_sweep, sweep_parser
from services.bench.load.sweep.run import sweep

OK, FAILED, INVALID, STOPPED = 0, 1, 3, 130


def main(arguments: Sequence[str]) -> int:
    """The exit code. Ends the process (SystemExit) for --help and wrong arguments, as argparse does."""
    out, err = Console(), Console(stderr=True)
    try:
        name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
        if name == "compare":
            return _compare(compare_parser().parse_args(rest), out)
        if name == "sweep":
            return _sweep(sweep_parser().parse_args(rest), out, err)
        if name == "report":
            from services.bench.report.command import main as report_main  # draws: needs the extra `bench`

            return report_main(rest, err)
        if name == "scenario":
            from services.bench.scenarios.command import main as scenario_main

            return scenario_main(rest, out, err)
        return _bench(parser().parse_args(arguments), out, err)
    except KeyboardInterrupt:  # before the run itself, which reports what it has
        return STOPPED
    except ConfigError as exc:
        err.print(f"error: {exc}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return FAILED


def _bench(options: argparse.Namespace, out: Console, err: Console) -> int:
    _allow_sockets()
    result, records = uvloop.run(bench(options, err))
    result["first_error"] = next((r.error for r in records if not r.ok), None)
    _save(options, detailed(result, records) if options.save_detailed else result, err)
    show(out, result, options.metric_percentiles)
    out.file.write(json_line(result) + "\n")
    return OK if result["valid"] else INVALID


def _sweep(options: argparse.Namespace, out: Console, err: Console) -> int:
    _allow_sockets()
    result = uvloop.run(sweep(options, err))
    _save(options, result, err)
    show_sweep(out, result)
    out.file.write(json_line(result) + "\n")
    return OK if result["valid"] else INVALID


def _save(options: argparse.Namespace, result: Mapping[str, Any], err: Console) -> None:
    if options.save_result or options.save_detailed or options.append_result or options.result_filename:
        path = options.result_dir / (options.result_filename or default_name())
        save(path, result, is_added=options.append_result)
        err.print(f"saved: {path}", markup=False, highlight=False, soft_wrap=True)


def _allow_sockets() -> None:
    """Every request of an open loop may need a socket: take as many as the system grants."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _compare(options: argparse.Namespace, out: Console) -> int:
    found = compare(read_runs(options.a), read_runs(options.b), options.seed)
    out.print(_table(found))
    for warning in found.warnings:
        out.print(f"note: {escape(warning)}", highlight=False, soft_wrap=True)
    out.file.write(json_line(found.to_dict()) + "\n")
    return OK


def _table(found: Comparison) -> Table:
    table = Table(title=f"B − A, 95 % interval over {found.method}", title_justify="left")
    for name in ("", "A", "B", "B − A", "low", "high", "B is"):
        table.add_column(name, justify="left" if name in ("", "B is") else "right")
    for d in found.differences:
        bounds = ("n/a" if x is None else f"{x:+.2f}" for x in (d.low, d.high))
        table.add_row(d.metric, f"{d.a:.2f}", f"{d.b:.2f}", f"{d.b - d.a:+.2f}", *bounds, d.verdict)
    return table
