"""The comparison of all policies: `python -m services.replay.table run TRACES RESULTS` and `… write RESULTS PAGE`.

`run` does what RESULTS, a file of JSON lines, does not hold yet, so it can be stopped and go on, and several may share
one file (`--shard 0/2`). First the saturation of each trace: the highest rate, found by bisection on its first half, at
which the default policy still serves 90 % of requests within their targets. Then every policy at parts of it, on the
second half, with arrivals varied by five seeds. `write` puts the table between the two markers of a page.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import PAIR_POLICIES
from services.replay.cluster import Replay
from services.replay.costs import LLAMA_70B
from services.replay.outcome import Targets, as_dict, outcome
from services.replay.record import Setting
from services.replay.traffic import Arrival, halves, load_trace, varied

LOADS = (0.9, 1.0, 0.8, 0.5, 1.1)
SEEDS = (1, 2, 3, 4, 5)
SATURATED_BELOW = 0.9
BISECTED = ("cost",)
"""Whose saturation is looked for; the highest counts. A policy that goes further shows it at loads from 1 on."""
BISECTIONS = 5
LOWEST, HIGHEST = 2.0, 8.0
BEGIN, END = "<!-- replay table: begin -->", "<!-- replay table: end -->"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One replay of the table."""

    trace: str
    load: float
    policy: str
    seed: int


def replayed(requests: Sequence[Arrival], policy: str, scale_rate: float, seed: int) -> Row:
    """One replay on 16 + 16 workers, as plain data."""
    arrivals = varied(requests, seed, scale_rate=scale_rate)
    setting = Setting(policy=policy, costs=LLAMA_70B, seed=seed)
    return as_dict(outcome(Replay(arrivals, setting).run(), setting, Targets()))


def saturation(requests: Sequence[Arrival], policy: str) -> float:
    """Rate, in multiples of the trace's own, at which the policy stops serving 90 % in time."""
    low, high = LOWEST, HIGHEST
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if replayed(requests, policy, middle, SEEDS[0])["good_share"] >= SATURATED_BELOW:
            low = middle
        else:
            high = middle
    return round(low, 3)


def cells(traces: Sequence[str]) -> list[Cell]:
    """All of the table, those of one seed before those of the next."""
    return [Cell(t, load, p, seed) for seed in SEEDS for load in LOADS for t in traces for p in PAIR_POLICIES]


def read(results: Path) -> tuple[dict[Cell, Row], dict[str, dict[str, float]]]:
    """What has been run: cells, and the saturation of each trace by policy."""
    rows: dict[Cell, Row] = {}
    found: dict[str, dict[str, float]] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        data = json.loads(line)
        if data["kind"] == "saturation":
            found.setdefault(data["trace"], {})[data["policy"]] = data["scale_rate"]
        else:
            rows[Cell(data["trace"], data["load"], data["policy"], data["seed"])] = data
    return rows, found


def run(folder: Path, results: Path, shard: tuple[int, int]) -> None:
    """Whatever is missing in ``results`` of this shard's share; saturations first, by shard 0 or alone."""
    traces = {path.stem: load_trace(path) for path in sorted(folder.glob("*.jsonl"))}
    index, count = shard
    wanted = [(name, policy) for name in traces for policy in BISECTED]
    for name, policy in wanted[index::count]:
        if policy not in read(results)[1].get(name, {}):
            rate = saturation(halves(traces[name])[0], policy)
            _append(results, {"kind": "saturation", "trace": name, "policy": policy, "scale_rate": rate})
    for cell in cells(list(traces))[index::count]:
        rows, found = read(results)
        rates = found.get(cell.trace, {})
        if cell in rows or len(rates) < len(BISECTED):
            continue  # another shard still looks for the saturation: run again
        scale_rate = cell.load * max(rates.values())
        row = replayed(halves(traces[cell.trace])[1], cell.policy, scale_rate, cell.seed)
        about = {"kind": "cell", "trace": cell.trace, "load": cell.load, "seed": cell.seed, "scale_rate": scale_rate}
        _append(results, about | row)


def _append(results: Path, row: Mapping[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(results: Path) -> str:
    """Markdown: for each trace and load every policy's mean over the seeds that have been run."""
    rows, found = read(results)
    lines: list[str] = []
    for trace in sorted({cell.trace for cell in rows}):
        rates = found[trace]
        best = max(rates.values())
        told = ", ".join(f"{policy} {rate:g}" for policy, rate in sorted(rates.items()))
        lines += [f"**{trace}**: saturated at {best:g} times its own rate (by policy: {told}).", ""]
        lines += [*_rows(trace, rows), ""]
    return "\n".join(lines)


def _rows(trace: str, rows: Mapping[Cell, Row]) -> Iterator[str]:
    yield "| load | policy | in time | goodput /s | TTFT p50 | p90 | p99 ms | TPOT p90 ms | hit | balance P | seeds |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for load in sorted({cell.load for cell in rows if cell.trace == trace}):
        for policy in PAIR_POLICIES:
            mine = [row for cell, row in rows.items() if (cell.trace, cell.load, cell.policy) == (trace, load, policy)]
            if mine:
                ttft = [statistics.mean(r["ttft_ms"][p] for r in mine) for p in ("p50", "p90", "p99")]
                tpot = statistics.mean(r["tpot_ms"]["p90"] for r in mine)
                share, goodput, hit, balance = (
                    statistics.mean(r[name] for r in mine)
                    for name in ("good_share", "goodput", "hit_rate", "prefill_balance")
                )
                yield (
                    f"| {load:g} | {policy} | {100 * share:.1f} % | {goodput:.2f} | {ttft[0]:.0f} | {ttft[1]:.0f} | "
                    f"{ttft[2]:.0f} | {tpot:.1f} | {100 * hit:.1f} % | {balance:.2f} | {len(mine)} |"
                )


def write(results: Path, page: Path) -> None:
    """Replace what is between the markers of a page. Raises ValueError where they are missing."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.replay.table")
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("traces", type=Path, help="folder with *.jsonl in Mooncake's form")
    runner.add_argument("results", type=Path)
    runner.add_argument("--shard", default="0/1", help="this share of the work, e.g. 0/2 and 1/2")
    writer = commands.add_parser("write")
    writer.add_argument("results", type=Path)
    writer.add_argument("page", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        index, _, count = given.shard.partition("/")
        run(given.traces, given.results, (int(index), int(count)))
    else:
        write(given.results, given.page)


if __name__ == "__main__":
    main()
