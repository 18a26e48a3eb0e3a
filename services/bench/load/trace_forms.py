"""Traces as CSV: Azure's LLM inference traces and BurstGPT. Their prompts are unrelated: nothing says what is shared.

Azure     TIMESTAMP,ContextTokens,GeneratedTokens                   a date and time for each request
BurstGPT  Timestamp,…,Request tokens,Response tokens,…              seconds; an answer of 0 tokens had failed there
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from datetime import datetime

from kvstore.errors import ConfigError
from services.bench.load.trace_line import TraceLine

AZURE, BURSTGPT = "azure", "burstgpt"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
Row = Mapping[str, str]


def form_of(text: str) -> str | None:
    """azure or burstgpt by the header; None for anything else."""
    columns = {name.strip() for name in text.partition("\n")[0].split(",")}
    if columns >= set(AZURE_COLUMNS):
        return AZURE
    return BURSTGPT if columns >= set(BURSTGPT_COLUMNS) else None


def read_csv(text: str, form: str, where: str) -> list[TraceLine]:
    """The requests of a trace; times count from its first row.

    Raises:
        ConfigError: a column is missing, or a row cannot be read; the message has its number.
    """
    names = AZURE_COLUMNS if form == AZURE else BURSTGPT_COLUMNS
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    if missing := [name for name in names if name not in (reader.fieldnames or ())]:
        raise ConfigError(f"--dataset-path {where} is no {form} trace: it lacks {', '.join(missing)}")
    seconds: Callable[[str], float] = _moment_s if form == AZURE else float
    found: list[TraceLine] = []
    first_s: float | None = None
    for row in reader:
        at_s, prompt, answer = _numbers(row, names, seconds, f"{where}:{reader.line_num}")
        first_s = at_s if first_s is None else first_s
        if at_s < first_s:
            raise ConfigError(f"{where}:{reader.line_num}: {names[0]} lies before that of the first row")
        if answer or form == AZURE:
            found.append(TraceLine(at_s - first_s, prompt, answer, ()))
    return found


def _numbers(row: Row, names: tuple[str, ...], seconds: Callable[[str], float], where: str) -> tuple[float, int, int]:
    try:
        at_s, prompt, answer = seconds(row[names[0]]), int(row[names[1]]), int(row[names[2]])
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{where}: {exc}") from None
    if not math.isfinite(at_s) or prompt < 0 or answer < 0:
        raise ConfigError(f"{where}: {', '.join(names)} must be numbers from 0")
    return at_s, prompt, answer


def _moment_s(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()
