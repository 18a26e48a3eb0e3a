"""What is drawn, from results as they were saved. A figure is None where its results do not hold what it shows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart also by those who see few colours. Source: Okabe and Ito."""
WAITING, PREFILL, DECODE, FAILED = "#bbbbbb", "#e69f00", "#0072b2", "#cc0000"
MAX_BARS = 400  # requests of a timeline; a row needs a pixel
DPI = 110
Result = Mapping[str, Any]


def name_of(result: Result, number: int) -> str:
    return str(result.get("label") or f"run {number + 1}")


def latency_cdf(runs: Sequence[Result]) -> Figure | None:
    """Share of the requests that were answered within a time: first token and whole answer. Failures count as never."""
    detailed = [(i, run) for i, run in enumerate(runs) if run.get("requests")]
    if not detailed:
        return None
    figure, axes = _canvas(1, 2, (11.0, 4.2))
    for axis, key, title in zip(axes, ("ttft_ms", "e2el_ms"), ("first token", "whole request"), strict=True):
        for i, run in detailed:
            rows = [row for row in run["requests"] if not row.get("is_cancelled")]
            seen = np.sort([row[key] for row in rows if not row["error"] and row[key] is not None])
            share = np.arange(1, len(seen) + 1) / max(1, len(rows))
            axis.step(seen, share, where="post", color=COLOURS[i % len(COLOURS)], label=name_of(run, i))
        axis.set_title(f"{title}, from the scheduled send")
        axis.set_xlabel("milliseconds")
        axis.set_ylabel("share of the requests")
        axis.set_ylim(0, 1.02)
        axis.set_xlim(left=0)
        axis.legend(loc="lower right")
    return figure


def timeline(run: Result) -> Figure | None:
    """A row for each request: waiting in the client, until its first token, until its end."""
    rows = run.get("requests") or []
    if not rows:
        return None
    shown = rows[:MAX_BARS]
    figure, (axis,) = _canvas(1, 1, (11.0, min(9.0, 1.8 + 0.05 * len(shown))))
    for y, row in enumerate(shown):
        _bar(axis, y, row)
    axis.set_xlabel("seconds since the first was due")
    axis.set_ylabel("request")
    axis.invert_yaxis()
    left_out = f", the first {MAX_BARS} of {len(rows)}" if len(rows) > MAX_BARS else ""
    axis.set_title(f"{run.get('label') or 'requests'}{left_out}")
    for label, colour in (("waits in the client", WAITING), ("to the first token", PREFILL), ("tokens", DECODE)):
        axis.plot([], [], color=colour, linewidth=4, label=label)
    axis.plot([], [], color=FAILED, marker="x", linestyle="none", label="failed or cancelled")
    axis.legend(loc="upper right")
    return figure


def _bar(axis: Axes, y: int, row: Mapping[str, Any]) -> None:
    due_s = row["due_ms"] / 1000
    sent_s = row.get("sent_ms", row["due_ms"]) / 1000
    first_s = None if row["ttft_ms"] is None else due_s + row["ttft_ms"] / 1000
    end_s = None if row["e2el_ms"] is None else due_s + row["e2el_ms"] / 1000
    axis.hlines(y, due_s, sent_s, color=WAITING, linewidth=2)
    if first_s is not None:
        axis.hlines(y, sent_s, first_s, color=PREFILL, linewidth=2)
    if first_s is not None and end_s is not None:
        axis.hlines(y, first_s, end_s, color=DECODE, linewidth=2)
    if row["error"] or row.get("is_cancelled"):
        axis.plot(end_s or first_s or sent_s, y, color=FAILED, marker="x", markersize=4)


def goodput(runs: Sequence[Result], sweeps: Sequence[Result]) -> Figure | None:
    """Good requests a second against the rate that was asked for; on the dashed line all of them are good."""
    series = [_of_sweep(sweep, i) for i, sweep in enumerate(sweeps)] + _of_runs(runs)
    if not any(points for _, points, _ in series):
        return None
    figure, (axis,) = _canvas(1, 1, (7.5, 4.6))
    most = 0.0
    for i, (name, points, ends) in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        axis.plot(
            [x for x, _ in points], [y for _, y in points], color=colour, marker="o", markersize=3, linestyle="none"
        )
        axis.plot(*_means(points), color=colour, linewidth=1.2, label=name)
        for end in ends:
            axis.axvline(end, color=colour, linestyle=":", linewidth=1)
        most = max([most, *ends, *(x for x, _ in points)])
    axis.plot([0, most], [0, most], color="#888888", linestyle="--", linewidth=1)
    axis.set_xlim(0, 1.05 * most)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests per second, as asked")
    axis.set_ylabel("good requests per second")
    axis.legend(loc="best")
    return figure


def _means(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Rates in order, and the mean of what was seen at each."""
    rates = sorted({x for x, _ in points})
    return rates, [float(np.mean([y for x, y in points if x == rate])) for rate in rates]


Series = tuple[str, list[tuple[float, float]], list[float]]


def _of_sweep(sweep: Result, number: int) -> Series:
    """Whole probes only: one that was cut short tells no goodput."""
    whole = [p for p in sweep["probes"] if not p["is_cut_short"]]
    points = [(p["rate_rps"], p["result"]["request_goodput"]) for p in whole]
    ends = [end for end in (sweep["max_request_rate"], sweep["lowest_failing_rate"]) if end is not None]
    return str(sweep.get("label") or f"sweep {number + 1}"), [x for x in points if x[1] is not None], ends


def _of_runs(runs: Sequence[Result]) -> list[Series]:
    """Runs of one label are one line."""
    by_label: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        rate, good = run.get("request_rate"), run.get("request_goodput")
        if isinstance(rate, int | float) and good is not None:
            by_label.setdefault(str(run.get("label") or "runs"), []).append((float(rate), float(good)))
    return [(label, points, []) for label, points in by_label.items()]


def png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI)
    return data.getvalue()


def _canvas(rows: int, columns: int, size_inches: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axis in axes:
        axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
