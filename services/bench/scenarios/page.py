"""docs/benchmarks.md from the scenarios' JSON lines: every figure with the command that made it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.bench.scenarios.findings import HOLDS, OPPOSITE, UNKNOWN

HEAD = """# Benchmarks

Written by `make bench` (`pdray bench scenario --form short --output docs/benchmarks.jsonl --page docs/benchmarks.md`)
from [benchmarks.jsonl](benchmarks.jsonl). Do not edit it: change a scenario in `services/bench/scenarios`, and run it
again.

Each scenario starts both sides with `pdray serve`, puts the same load on them in turn, and reverses the order from
round to round. *change* is candidate over baseline, the mean over the rounds, with its 95 % interval. *holds* means
that the whole interval lies on the claimed side, *does not hold* that it lies on the other, *not shown* that these
rounds cannot tell. "No worse" means by no more than 10 %. What is measured and how: [bench.md](bench.md).
"""
WORDS = {"lower": "lower", "higher": "higher", "not_lower": "no worse (higher is better)", "not_higher": "no worse"}


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The whole file; of several results of a scenario the last one counts."""
    latest = {result["scenario"]: result for result in results}
    parts = [HEAD, _overview(latest.values()), *(_scenario(result) for result in latest.values())]
    return "\n".join(parts)


def _overview(results: Iterable[Mapping[str, Any]]) -> str:
    rows = ["| scenario | holds | does not hold | not shown |", "|---|---|---|---|"]
    for result in results:
        verdicts = [finding["verdict"] for finding in result["findings"]]
        other = len(verdicts) - verdicts.count(HOLDS) - verdicts.count(OPPOSITE)
        rows.append(f"| {result['title']} | {verdicts.count(HOLDS)} | {verdicts.count(OPPOSITE)} | {other} |")
    return "\n".join([*rows, ""])


def _scenario(result: Mapping[str, Any]) -> str:
    base, other = result["baseline"], result["candidate"]
    lines = [f"## {result['title']}", "", result["claim"], ""]
    lines += [f"| load | figure | {base} | {other} | change | expected | |", "|---|---|---|---|---|---|---|"]
    lines += [_finding(finding) for finding in result["findings"]]
    lines += ["", *_broken(result)]
    if result["note"]:
        lines += [result["note"], ""]
    lines += [_where(result), "", "```", *_commands(result), "```", ""]
    return "\n".join(lines)


def _finding(f: Mapping[str, Any]) -> str:
    change = "n/a" if f["change"] is None else f"{f['change']:+.0%}"
    if f["low"] is not None:
        change += f" ({f['low']:+.0%} to {f['high']:+.0%})"
    verdict = f["verdict"] if f["verdict"] == HOLDS else f"**{f['verdict']}**"
    values = (_value(f["metric"], f["baseline"]), _value(f["metric"], f["candidate"]))
    return (
        f"| {f['case']} | `{f['metric']}` | {values[0]} | {values[1]} | {change} | {WORDS[f['expected']]} | {verdict} |"
    )


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return "n/a"
    if metric.endswith("_ms"):
        return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
    return f"{value:.1%}" if metric.endswith(("_rate", "_share")) and value <= 1 else f"{value:.2f}"


def _broken(result: Mapping[str, Any]) -> list[str]:
    """In words: what does not hold, what has no figures, and runs that were not valid."""
    lines = []
    for f in result["findings"]:
        if f["verdict"] in (OPPOSITE, UNKNOWN):
            lines.append(f"- **{f['case']}: `{f['metric']}` {f['verdict']}** on this machine.")
    for run in result["runs"]:
        if not run["result"].get("valid", True):
            reasons = "; ".join(run["result"]["invalid_reasons"])
            lines.append(
                f"- Left out: {run['case']}, {run['side']}, round {run['round'] + 1}, no valid run: {reasons}."
            )
    return [*lines, ""] if lines else []


def _where(result: Mapping[str, Any]) -> str:
    seen = result["hardware"]
    kernels = f", {', '.join(seen['instructions'])}" if seen["instructions"] else ""
    commit = f", commit {result['commit']}" if result["commit"] else ""
    return (
        f"Form {result['form']}, rounds: {result['rounds']}, {result['duration']:.0f} s, {result['date']}{commit}, "
        f"scenario {result['digest']}; {seen['cores']} cores of {seen['cpu']}{kernels}, {seen['memory_gib']:g} GiB."
    )


def _commands(result: Mapping[str, Any]) -> list[str]:
    """Servers and loads of each case; the seeds of other rounds differ, and nothing else does."""
    lines: list[str] = []
    for case, servers in result["servers"].items():
        lines.append(f"# {case}")
        lines += [f"{command}    # {side}" for side, command in servers.items()]
        if case in result["capacities"]:
            lines.append(
                f"# capacity of {result['baseline']}: {result['capacities'][case]:.2f} requests/s, closed loop"
            )
        lines += list(dict.fromkeys(run["command"] for run in result["runs"] if run["case"] == case))[:1]
    return lines
