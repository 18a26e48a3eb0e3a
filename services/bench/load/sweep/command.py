"""`pdray bench sweep`: its options, and its result for people."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.bench.load.options import add_load, add_result, positive, seconds, whole

INTRO = """\
Find the highest rate at which a server keeps an SLO.

  pdray bench sweep --base-url http://127.0.0.1:8000 --goodput ttft:2000 tpot:80 --random-input-len 512

The rate is doubled or halved until one is met and one is not, then bisected. At the end both ends are measured afresh,
--repeats times in turn; an end that does not hold any more reopens the search. Before each probe one request is sent by
itself: how much its time changes tells how far the machine has drifted. Probes should be long beside a request:
in a short one an overloaded server has no time to fall behind. The last line of the output is one JSON object.
"""


def sweep_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pdray bench sweep",
        usage="pdray bench sweep --goodput NAME:MS … [options of pdray bench]",
        description=INTRO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument_group("sweep").add_argument
    add("--slo-share", type=positive, default=0.9, help="requests that must keep it; default: %(default)s")
    add("--start-rate", type=positive, default=1.0, help="requests per second; default: %(default)s")
    add("--min-rate", type=positive, default=0.01, help="default: %(default)s")
    add("--max-rate", type=positive, default=10000.0, help="default: %(default)s")
    add("--precision", type=positive, default=0.05, help="part by which the ends may differ; default: %(default)s")
    add("--repeats", type=whole, default=3, help="odd; confirmations of each end; default: %(default)s")
    add("--max-probes", type=whole, default=40, help="then it gives up; default: %(default)s")
    add("--probe-s", type=positive, default=60.0, help="seconds of arrivals in a probe; default: %(default)s")
    add("--min-requests", type=whole, default=20, help="of a probe; --num-prompts does the same; default: %(default)s")
    add("--settle-s", type=seconds, default=1.0, help="pause after a probe; default: %(default)s")
    add_load(made)
    add_result(made)
    return made


def show_sweep(console: Console, result: Mapping[str, Any]) -> None:
    """The probes in order of rate, and what they say."""
    table = Table(title="probes, by rate", title_justify="left")
    for name in ("requests/s", "good", "met", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50", "reference ms"):
        table.add_column(name, justify="right")
    for probe in sorted(result["probes"], key=lambda p: p["rate_rps"]):
        seen = probe["result"]
        values = (seen["request_goodput"], seen["median_ttft_ms"], seen["p99_ttft_ms"], seen["median_tpot_ms"])
        share = "n/a" if probe["goodput_share"] is None else f"{probe['goodput_share']:.0%}"
        met = "yes" if probe["meets"] else "no, cut short" if probe["is_cut_short"] else "no"
        row = [_shown(x) for x in (*values, probe["reference_ms"])]
        table.add_row(f"{probe['rate_rps']:.3f}", share, met, *row)
    console.print(table)
    bounds = ", ".join(f"{name} ≤ {ms:g} ms" for name, ms in result["goodput_slo_ms"].items())
    console.print(
        f"{result['slo_share']:.0%} of the requests keep {bounds} up to [bold]{_shown(result['max_request_rate'])}[/] "
        f"requests/s, and no more at {_shown(result['lowest_failing_rate'])}; goodput there: "
        f"{_shown(result['request_goodput'])}/s",
        highlight=False,
        soft_wrap=True,
    )
    if result["has_drifted"]:
        console.print(
            f"note: one request by itself took up to {result['reference_drift']:.2f} times as long as at its fastest: "
            "the machine's speed changed meanwhile",
            highlight=False,
            soft_wrap=True,
        )
    for reason in result["invalid_reasons"]:
        console.print(escape(f"INVALID: {reason}"), highlight=False, soft_wrap=True)


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
