"""A result for people, as tables, and for programs, as one JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.errors import ConfigError
from services.bench.load.records import Record
from services.bench.load.summary import METRICS

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between chunks",
    "e2el": "whole request",
    "service_ttft": "first token, after its send",
    "service_e2el": "whole, after its send",
}


def json_line(result: Mapping[str, Any]) -> str:
    """One line; raises ValueError for NaN, which would be a defect of the summary."""
    return json.dumps(result, allow_nan=False)


def detailed(result: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """The result with a row for each request: what `compare` draws from. Times in ms; null where there is none."""
    rows = [
        {
            "due_ms": _ms(r.due_s - records[0].due_s),
            "lag_ms": _ms(r.lag_s),
            "sent_ms": _ms(r.sent_s - records[0].due_s),
            "ttft_ms": _ms(r.ttft_s),
            "tpot_ms": _ms(r.tpot_s),
            "e2el_ms": _ms(r.e2el_s),
            "service_e2el_ms": _ms(r.service_e2el_s),
            "input_tokens": r.input_tokens,
            "output_tokens": r.output_tokens,
            "cached_tokens": r.cached_tokens,
            "tenant": r.tenant,
            "is_cancelled": r.is_cancelled,
            "id": r.answer_id,
            "error": r.error,
        }
        for r in records
    ]
    return {**result, "requests": rows}


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1000, 4)


def save(path: Path, result: Mapping[str, Any], *, is_added: bool) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if is_added else "w", encoding="utf-8") as file:
            file.write(json_line(result) + "\n")
    except OSError as exc:
        raise ConfigError(f"--result-filename {path}: {exc}") from None


def default_name() -> str:
    return f"pdray-bench-{time.strftime('%Y%m%d-%H%M%S')}.json"


def show(console: Console, result: Mapping[str, Any], percentiles: Sequence[float]) -> None:
    """The tables and, in words, what must be known to read them."""
    console.print(_counts(result))
    console.print(_latencies(result, percentiles))
    if tenants := result.get("tenants"):
        console.print(_tenants(tenants))
    if phases := result.get("server_phases"):
        console.print(_phases(phases))
    for line in _notes(result):
        console.print(escape(line), highlight=False, soft_wrap=True)


def _counts(result: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = [
        ("requests", f"{result['completed']} succeeded, {result['failed']} failed, {result['cancelled']} cancelled"),
        ("duration", f"{result['duration']:.2f} s"),
        ("requests per second", _shown(result["request_throughput"])),
        ("good requests per second", _shown(result["request_goodput"])),
        ("tokens", f"{result['total_input_tokens']} in, {result['total_output_tokens']} out"),
        ("output tokens per second", _shown(result["output_throughput"])),
        ("all tokens per second", _shown(result["total_token_throughput"])),
        ("prompt tokens cached", _share(result["cache_hit_rate"])),
        ("client: p99 late by", f"{_shown(result['p99_client_lag_ms'])} ms sending, "
                                f"{_shown(result['p99_client_loop_lag_ms'])} ms reading"),
        ("client: CPU", f"{_share(result['client_cpu_share'])} of a core, "
                       f"{_shown(result['client_cpu_us_per_token'])} µs per token"),
    ]  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    return table


def _latencies(result: Mapping[str, Any], percentiles: Sequence[float]) -> Table:
    columns = ["mean", "median", *(f"p{p:g}" for p in percentiles if p != 50)]
    table = Table(title="milliseconds, from the scheduled send", title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    names = [*METRICS, "service_ttft", "service_e2el"]
    for name in names:
        table.add_row(TITLES[name], *(_shown(result[f"{column}_{name}_ms"]) for column in columns))
    return table


def _tenants(tenants: Mapping[str, Any]) -> Table:
    table = Table(title="by tenant", title_justify="left")
    names = ("", "succeeded", "failed", "good", "tokens in", "tokens out", "TTFT p50", "TPOT p50", "E2E p50")
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for name, seen in tenants.items():
        counts = ("completed", "failed", "good_requests", "total_input_tokens", "total_output_tokens")
        shown = ["n/a" if seen[key] is None else str(seen[key]) for key in counts]
        table.add_row(escape(name), *shown, *(_shown(seen[f"median_{m}_ms"]) for m in ("ttft", "tpot", "e2el")))
    return table


def _phases(phases: Mapping[str, Any]) -> Table:
    table = Table(title=f"where pdray spent them, of {phases['requests']} requests", title_justify="left")
    table.add_column("")
    for column in ("mean", "p50", "p99"):
        table.add_column(column, justify="right")
    for part, values in phases["parts_ms"].items():
        table.add_row(part, *(_shown(values[column]) for column in ("mean", "p50", "p99")))
    return table


def _notes(result: Mapping[str, Any]) -> Iterable[str]:
    for kind, count in result["errors"].items():
        yield f"failed: {count} × {kind}"
    if example := result.get("first_error"):
        yield f"the first: {example}"
    asked, got = result["requested_input_tokens"], result["total_input_tokens"]
    if not result["failed"] and got and abs(got - asked) > 0.05 * asked:
        yield f"note: prompts were planned with {asked} tokens; the server counted {got}"
    if result["loop"] == "closed":
        yield "note: a closed loop; its users wait for the server, so it shows no overload"
    if result["warm_cache"]:
        yield (
            f"note: the cache was warm: {result['warm_cache_tokens']} prompt tokens that this run sent for the first "
            "time were cached already; take another --seed for a cold cache"
        )
    for reason in result["invalid_reasons"]:
        yield f"INVALID: {reason}"


def _shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"
