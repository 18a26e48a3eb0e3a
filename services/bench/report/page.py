"""One HTML file with everything in it: numbers, pictures as data, no script, nothing from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from services.bench.load.show import TITLES
from services.bench.load.summary import METRICS

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem } th, td { padding: 0.2rem 0.8rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd } img { max-width: 100% }
.bad { color: #b00000 } pre { white-space: pre-wrap; background: #f5f5f5; padding: 0.8rem; font-size: 12px }
@media (prefers-color-scheme: dark) { body { background: #fff } }
</style></head><body>
<h1>{{ title }}</h1>
{% for run in runs %}<h2>{{ run.name }}</h2>
<p>{{ run.what }}</p>
{% for reason in run.reasons %}<p class="bad">Invalid: {{ reason }}</p>{% endfor %}
<table>{% for name, value in run.counts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<table><tr><th>milliseconds</th>{% for c in run.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for name, values in run.rows %}<tr><td>{{ name }}</td>{% for v in values %}<td>{{ v }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
{% for sweep in sweeps %}<h2>{{ sweep.name }}</h2>
<p>{{ sweep.what }}</p>
{% for reason in sweep.reasons %}<p class="bad">Invalid: {{ reason }}</p>{% endfor %}
<table><tr>{% for c in sweep.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for values in sweep.rows %}<tr>{% for v in values %}<td>{{ v }}</td>{% endfor %}</tr>{% endfor %}</table>
{% endfor %}
{% for name, data in pictures %}<h2>{{ name }}</h2>
<img alt="{{ name }}" src="data:image/png;base64,{{ data }}">
{% endfor %}
{% for name, data in raw %}<details><summary>{{ name }}, as JSON</summary><pre>{{ data }}</pre></details>{% endfor %}
</body></html>
"""
COLUMNS = ("mean", "median", "p90", "p99")
Result = Mapping[str, Any]


def page(
    title: str, runs: Sequence[tuple[str, Result]], sweeps: Sequence[tuple[str, Result]], pictures: Mapping[str, bytes]
) -> str:
    """The page; ``pictures`` are PNGs by the heading that they stand under."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE)
    return template.render(
        title=title,
        runs=[_run(name, run) for name, run in runs],
        sweeps=[_sweep(name, sweep) for name, sweep in sweeps],
        pictures=[(name, base64.b64encode(data).decode()) for name, data in pictures.items()],
        raw=[(name, json.dumps(_without_rows(result), indent=1)) for name, result in (*runs, *sweeps)],
    )


def _run(name: str, run: Result) -> dict[str, Any]:
    names = ("dataset_name", "loop", "request_rate", "max_concurrency", "num_prompts", "seed", "model_id", "date")
    counts = (
        ("requests that succeeded", run["completed"]),
        ("failed", run["failed"]),
        ("seconds", _shown(run["duration"])),
        ("requests per second", _shown(run["request_throughput"])),
        ("good requests per second", _shown(run.get("request_goodput"))),
        ("output tokens per second", _shown(run["output_throughput"])),
        ("prompt tokens cached", _share(run.get("cache_hit_rate"))),
        ("p99 lateness of the client, ms", _shown(run.get("p99_client_lag_ms"))),
    )
    rows = [(TITLES[metric], [_shown(run.get(f"{c}_{metric}_ms")) for c in COLUMNS]) for metric in METRICS]
    return {
        "name": name,
        "what": ", ".join(f"{key} {run[key]}" for key in names if run.get(key) is not None),
        "reasons": run.get("invalid_reasons", []),
        "counts": counts,
        "columns": COLUMNS,
        "rows": rows,
    }


def _sweep(name: str, sweep: Result) -> dict[str, Any]:
    bounds = ", ".join(f"{key} up to {ms:g} ms" for key, ms in sweep["goodput_slo_ms"].items())
    rows = [
        (
            f"{p['rate_rps']:.3f}",
            _share(p["goodput_share"]),
            "yes" if p["meets"] else "no",
            _shown(p["result"]["request_goodput"]),
            _shown(p["result"]["median_ttft_ms"]),
            _shown(p["result"]["median_tpot_ms"]),
            p["phase"],
        )
        for p in sorted(sweep["probes"], key=lambda p: p["rate_rps"])
    ]
    return {
        "name": name,
        "what": (
            f"{sweep['slo_share']:.0%} of the requests keep {bounds} up to {_shown(sweep['max_request_rate'])} "
            f"requests per second, and no more at {_shown(sweep['lowest_failing_rate'])}; goodput there "
            f"{_shown(sweep['request_goodput'])} per second."
        ),
        "reasons": sweep["invalid_reasons"],
        "columns": ("requests/s", "good", "met", "goodput/s", "TTFT p50 ms", "TPOT p50 ms", "phase"),
        "rows": rows,
    }


def _without_rows(result: Result) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("requests", "probes")}


def _shown(value: Any) -> str:
    return "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"
