"""Replay of recorded traffic. Mooncake's form: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length``
and ``hash_ids``, one id for each block of 512 prompt tokens; equal ids are equal blocks. CSV: see `trace_forms`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from services.bench.load.prompts import Prompt, Segment
from services.bench.load.trace_forms import AZURE, BURSTGPT, form_of, read_csv
from services.bench.load.trace_line import TraceLine as TraceLine
from services.bench.load.workloads import Item

MOONCAKE, AUTO = "mooncake", "auto"
FORMS = (AUTO, MOONCAKE, AZURE, BURSTGPT)
BLOCK_TOKENS = 512
_BLOCK, _TAIL = 3, 4
"""First number of a segment's key after the seed: a named block, and tokens past the last name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Which part of a trace is replayed, and how it is scaled."""

    start_s: float = 0.0
    end_s: float = math.inf
    time_scale: float = 1.0  # 2: half as fast
    length_scale: float = 1.0  # of prompts, blocks and answers

    def __post_init__(self) -> None:
        if not (0 < self.time_scale < math.inf and 0 < self.length_scale < math.inf):
            raise ConfigError("--trace-time-scale and --trace-length-scale must be above 0 and finite")
        if not 0 <= self.start_s < self.end_s:
            raise ConfigError("--trace-start-s must be at least 0 and below --trace-end-s")

    def cut(self, lines: list[TraceLine]) -> list[TraceLine]:
        """The lines with start_s ≤ at_s < end_s, in order of time."""
        return sorted((x for x in lines if self.start_s <= x.at_s < self.end_s), key=lambda x: x.at_s)

    def offsets_s(self, lines: list[TraceLine]) -> list[float]:
        """When each line of a cut is due; its first one at 0."""
        return [(line.at_s - lines[0].at_s) * self.time_scale for line in lines]

    def items(self, lines: list[TraceLine], seed: int) -> list[Item]:
        return [
            Item(self._prompt(line, seed, i), max(1, round(line.output_tokens * self.length_scale)))
            for i, line in enumerate(lines)
        ]

    def _prompt(self, line: TraceLine, seed: int, index: int) -> Prompt:
        block = max(1, round(BLOCK_TOKENS * self.length_scale))
        left = max(1, round(line.input_tokens * self.length_scale))
        segments: list[Segment] = []
        for name in line.blocks:
            if left > 0:
                segments.append(Segment((seed, _BLOCK, name), min(block, left)))
                left -= block
        if left > 0:
            segments.append(Segment((seed, _TAIL, index), left))
        return tuple(segments)


def read_trace(path: Path, form: str = AUTO) -> list[TraceLine]:
    """All requests of a trace; ``auto`` tells its form by the first line.

    Raises:
        ConfigError: the file cannot be read, or a line is not of its form; the message has its number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--dataset-path {path}: {exc}") from None
    kind = (form_of(text) or MOONCAKE) if form == AUTO else form
    if kind == MOONCAKE:
        lines = [_line(row, f"{path}:{i + 1}") for i, row in enumerate(text.split("\n")) if row.strip()]
    else:
        lines = read_csv(text, kind, str(path))
    if not lines:
        raise ConfigError(f"--dataset-path {path} holds no requests")
    return lines


def _line(row: str, where: str) -> TraceLine:
    try:
        data = json.loads(row)
        line = TraceLine(
            at_s=float(data["timestamp"]) / 1000,
            input_tokens=_count(data["input_length"]),
            output_tokens=_count(data["output_length"]),
            blocks=tuple(_count(x) for x in data.get("hash_ids", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{where} is no line of a Mooncake trace: {type(exc).__name__} {exc}") from None
    if not 0 <= line.at_s < math.inf:
        raise ConfigError(f"{where}: timestamp must be at least 0")
    return line


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0")
    return value
