"""Measures a scenario: both sides' servers up at once, loads in turn, the order reversed from round to round.

The load is `pdray bench` in a process of its own, so each figure's command is one that anybody can type.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from services.bench.load.summary import NO_SUCCESS
from services.bench.scenarios.findings import Finding, judge
from services.bench.scenarios.machine import commit, hardware
from services.bench.scenarios.scenario import FORMS, Capacity, Case, Scenario
from services.bench.scenarios.servers import PDRAY, Running, prepare, serving

SHOWN_URL = "http://127.0.0.1:8000"  # stands for a server's own in shown commands
LOAD_S = 1800.0  # longest run of one load
MAX_CLIENT_LAG_MS = 100  # client and servers share the cores; times here are ten times as long
WARM_UP = ("--num-prompts", "2", "--max-concurrency", "1", "--random-input-len", "64", "--random-output-len", "8")
KEPT = (
    "completed", "failed", "cancelled", "errors", "duration", "request_rate", "request_throughput", "request_goodput",
    "goodput_share", "output_throughput", "cache_hit_rate", "warm_cache", "mean_ttft_ms", "median_ttft_ms",
    "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "median_e2el_ms",
    "p99_e2el_ms", "client_cpu_share", "p99_client_lag_ms", "valid", "invalid_reasons",
)  # fmt: skip
Load = Callable[[str, Sequence[str]], dict[str, Any]]
"""From a server's URL and options of `pdray bench` to a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one side."""

    case: str
    side: str
    round: int
    command: str
    result: dict[str, Any]


class Measurement:
    """One scenario in one form; `measure` its cases, then `result`."""

    def __init__(self, scenario: Scenario, form: str, load: Load, tell: Callable[[str], None]) -> None:
        self._scenario, self._form_name, self._form = scenario, form, FORMS[form]
        self._load, self._tell = load, tell
        self._began_s = time.monotonic()
        self.findings: list[Finding] = []
        self.runs: list[Measured] = []
        self.servers: dict[str, dict[str, str]] = {}  # case -> side -> command
        self.capacities: dict[str, float] = {}  # case -> requests per second of the baseline

    def measure(self, case: Case, running: Mapping[str, Running]) -> None:
        """All rounds of one case against the two sides' servers."""
        sides = (self._scenario.baseline, self._scenario.candidate)
        number = self._scenario.cases.index(case)
        self.servers[case.name] = {side: running[side].command for side in sides}
        options = self._options(case, running[sides[0]])
        rows: list[dict[str, dict[str, Any]]] = []
        for k in range(self._form.rounds):
            seed = str(1000 * (k + 1) + number)
            rows.append({})
            for side in sides if k % 2 == 0 else sides[::-1]:
                given = [*options, "--seed", seed]
                result = self._load(running[side].url, given)
                rows[k][side] = result
                kept = {name: result[name] for name in KEPT if name in result}
                self.runs.append(
                    Measured(case=case.name, side=side, round=k, command=shown(SHOWN_URL, given), result=kept)
                )
                self._tell(f"{self._scenario.name}: {case.name}, round {k + 1}, {side}: {_short(result)}")
        for expectation in case.expect:
            base, other = ([_figure(row[side], expectation.metric) for row in rows] for side in sides)
            self.findings.append(judge(case.name, expectation, list(zip(base, other, strict=True))))

    def result(self) -> dict[str, Any]:
        """The scenario's JSON line."""
        scenario = self._scenario
        return {
            "benchmark": "scenario",
            "scenario": scenario.name,
            "title": scenario.title,
            "claim": scenario.claim.strip(),
            "note": scenario.note.strip(),
            "digest": scenario.digest,
            "form": self._form_name,
            "rounds": self._form.rounds,
            "baseline": scenario.baseline,
            "candidate": scenario.candidate,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": commit(),
            "hardware": hardware(),
            "duration": round(time.monotonic() - self._began_s, 1),
            "servers": self.servers,
            "capacities": self.capacities,
            "findings": [asdict(finding) for finding in self.findings],
            "runs": [asdict(run) for run in self.runs],
        }

    def _options(self, case: Case, baseline: Running) -> list[str]:
        """Options of `pdray bench` for a case, with its rate and its number of requests."""
        options = [*options_of(case.load), "--max-client-lag-ms", str(MAX_CLIENT_LAG_MS)]
        rate = case.load.get("request-rate")
        if case.capacity is not None:
            rate = round(case.capacity.part * self._capacity(case, case.capacity, options, baseline), 4)
            options += ["--request-rate", f"{rate:g}"]
        if case.requests:
            count = max(2, round(case.requests * self._form.scale))
        else:
            assert rate is not None
            count = max(4, math.ceil(float(rate) * case.seconds * self._form.scale))
        return [*options, "--num-prompts", str(count)]

    def _capacity(self, case: Case, capacity: Capacity, options: Sequence[str], baseline: Running) -> float:
        count = max(capacity.users, round(capacity.requests * min(1.0, self._form.scale)))
        closed = ["--max-concurrency", str(capacity.users), "--num-prompts", str(count), "--seed", "999"]
        found = self._load(baseline.url, [*options, *closed])["request_throughput"]
        if not found:
            raise ConfigError(f"scenario {self._scenario.name}, case {case.name!r}: the baseline answered no request")
        self.capacities[case.name] = found
        self._tell(f"{self._scenario.name}: {case.name}: capacity of {self._scenario.baseline} {found:.2f} requests/s")
        return float(found)


def run_scenario(
    scenario: Scenario, form: str, extra: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Start what it needs, measure, stop all. ``extra``: settings of every server.

    Raises:
        ConfigError: a server does not start, or a load cannot be run.
    """
    measurement = Measurement(scenario, form, bench_process, tell)
    sides = (scenario.baseline, scenario.candidate)
    for _, group in itertools.groupby(scenario.cases, key=lambda case: case.settings):
        cases = list(group)
        tell(f"{scenario.name}: starting {sides[0]} and {sides[1]}")
        settings = [{**scenario.settings_of(side, cases[0]), **extra} for side in sides]
        prepare(settings[0])
        with (
            tempfile.TemporaryDirectory(prefix="pdray-scenario-") as folder,
            serving(settings, Path(folder)) as running,
        ):
            for one in running:
                bench_process(one.url, WARM_UP)
            for case in cases:
                measurement.measure(case, dict(zip(sides, running, strict=True)))
    return measurement.result()


def options_of(load: Mapping[str, Any]) -> list[str]:
    """``{"random-input-len": 64, "goodput": ["ttft:2000"]}`` as options of `pdray bench`."""
    found: list[str] = []
    for name, value in load.items():
        found += [f"--{name}", *(str(x) for x in (value if isinstance(value, list) else [value]))]
    return found


def shown(url: str, options: Sequence[str]) -> str:
    return shlex.join(["pdray", "bench", "--base-url", url, *options])


def bench_process(url: str, options: Sequence[str]) -> dict[str, Any]:
    """`pdray bench` as a user runs it; an invalid run is a result that says so.

    Raises:
        ConfigError: it could not be done.
    """
    command = [*PDRAY, "bench", "--base-url", url, "--disable-tqdm", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{shown(url, options)}` did not end within {LOAD_S:.0f} s") from None
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise ConfigError(f"`{shown(url, options)}` ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _figure(result: Mapping[str, Any], metric: str) -> float | None:
    """What a run says; an invalid one says nothing. That nothing succeeded is a figure, too."""
    return None if set(result.get("invalid_reasons", ())) - {NO_SUCCESS} else result.get(metric)


def _short(result: Mapping[str, Any]) -> str:
    names = (("TTFT", "median_ttft_ms"), ("E2E", "median_e2el_ms"))
    times = ", ".join(f"{name} p50 {result[key]:.0f} ms" for name, key in names if result.get(key) is not None)
    invalid = "" if result.get("valid", True) else f"; INVALID: {result['invalid_reasons'][0]}"
    return f"{result['completed']} answered, {result['failed']} failed, {times}{invalid}"
