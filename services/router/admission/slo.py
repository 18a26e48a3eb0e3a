"""A request's targets, from its headers, its body or the settings; and afterwards which were missed, and where.

A target is a time that the client sees. Headers come before the body's ``slo``, and both before the settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from services.protocol.errors import RequestError, invalid
from services.router.fields import Fields, shown
from services.slo_config import SLOConfig

HEADERS = {"x-pdray-ttft-ms": "ttft_ms", "x-pdray-tpot-ms": "tpot_ms", "x-pdray-e2e-ms": "e2e_ms"}
MAX_MS = 1e9

PHASES = {
    "accept": "front",
    "tokenize": "front",
    "router_queue": "queue",
    "p_queue": "queue",
    "kv_load": "load",
    "prefill": "prefill",
    "first_emit": "emit",
    "exposed_transfer": "transfer",
    "d_wait": "decode_wait",
    "decode": "decode",
}
"""Part of a request's time -> the phase that a missed target is counted under."""
FAILED = "failed"
"""Phase of every target of a request that ended with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Milliseconds; None: no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return bool(self.targets)

    @property
    def targets(self) -> dict[str, float]:
        """Those that were set, as ttft, tpot and e2e."""
        values = {f.name.removesuffix("_ms"): getattr(self, f.name) for f in fields(self)}
        return {which: ms for which, ms in values.items() if ms is not None}


NO_SLO = SLO()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a request took. ``parts_us``: microseconds of each part named in `PHASES`."""

    ttft_ms: float | None
    e2e_ms: float | None
    tokens: int  # of the longest choice
    first_parts_us: Mapping[str, int]
    rest_parts_us: Mapping[str, int]

    @property
    def tpot_ms(self) -> float | None:
        """None for answers of one token."""
        if self.ttft_ms is None or self.e2e_ms is None or self.tokens < 2:
            return None
        return max(0.0, self.e2e_ms - self.ttft_ms) / (self.tokens - 1)


def slo_headers(pairs: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """The targets among a request's headers, or a call's metadata, as they came: field -> text."""
    found: dict[str, str] = {}
    for name, value in pairs:
        key = _text(name).lower()
        if key in HEADERS:
            found[HEADERS[key]] = _text(value)
    return found


def read_slo(headers: Mapping[str, str], body: Mapping[str, object] | None, defaults: SLOConfig) -> SLO:
    """The targets of one request.

    Args:
        headers: what `slo_headers` found.
        body: the body's ``slo`` object.

    Raises:
        RequestError: 400; a target that is no number above 0, or a field of ``slo`` that is none of the three.
    """
    own = Fields(body or {}, "slo")
    values: dict[str, float | None] = {}
    for header, field in HEADERS.items():
        written = own.number(field, 0, MAX_MS, above_low=True)
        sent = headers.get(field)
        default = getattr(defaults, field) or None
        values[field] = _number(header, sent) if sent is not None else written if written is not None else default
    if unknown := own.unread():
        raise invalid(f"slo.{shown(unknown[0])} is no target; there are ttft_ms, tpot_ms and e2e_ms", "slo")
    return SLO(**values)


def misses(slo: SLO, outcome: str, times: Times) -> dict[str, str]:
    """Targets that were missed, each with the phase that took the most of its time. Pure.

    Empty for a request that kept all of them, and for one that its client ended.
    """
    if outcome == "cancelled":
        return {}
    if outcome != "ok":
        return dict.fromkeys(slo.targets, FAILED)
    took = {"ttft": times.ttft_ms, "tpot": times.tpot_ms, "e2e": times.e2e_ms}
    parts: dict[str, Mapping[str, int]] = {
        "ttft": times.first_parts_us,
        "tpot": times.rest_parts_us,
        "e2e": {**times.first_parts_us, **times.rest_parts_us},
    }
    missed = (which for which, target in slo.targets.items() if (ms := took[which]) is not None and ms > target)
    return {which: longest_phase(parts[which]) for which in missed}


def longest_phase(parts_us: Mapping[str, int]) -> str:
    """The phase with the largest sum of parts; of equal ones the earlier."""
    sums: dict[str, int] = {}
    for part, us in parts_us.items():
        sums[PHASES[part]] = sums.get(PHASES[part], 0) + us
    return max(sums, key=lambda phase: sums[phase], default=FAILED)


def _number(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_MS:
        raise _no_target(header, text)
    return value


def _no_target(header: str, text: str) -> RequestError:
    return invalid(f"the header {header} must be milliseconds above 0 and at most {MAX_MS:g}, got {shown(text)}")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
