"""Where the time of one request went, as parts that add up exactly.

    received ─accept─ parsed ─tokenize─ ids ─router_queue─ submitted ─p_queue, kv_load, prefill, first_emit─ first byte
    first byte ─exposed_transfer, d_wait, decode─ done

The router's clock gives the outer points. The worker's parts are durations from the worker's own clock, so no two
clocks are ever compared; `first_emit` and `decode` take up what is left (network, event loops, front). All in whole
microseconds: sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

TTFT_PARTS = ("accept", "tokenize", "router_queue", "p_queue", "kv_load", "prefill", "first_emit")
REST_PARTS = ("exposed_transfer", "d_wait", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Moments on the router's clock, microseconds since the request was received; None: not reached."""

    accept_us: int | None = None
    tokenized_us: int | None = None
    submitted_us: int | None = None  # of the attempt that gave token 1
    first_byte_us: int | None = None
    done_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Durations that the workers measured, milliseconds."""

    queue_ms: float = 0.0
    kv_load_ms: float = 0.0
    compute_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    wait_ms: float = 0.0


def ttft_parts(points: Points, stages: Stages) -> dict[str, int]:
    """Microseconds of each of `TTFT_PARTS`; their sum is ``first_byte_us``. Empty before the first byte.

    Worker durations that do not fit between submission and first byte are shortened in proportion.
    """
    end = points.first_byte_us
    if end is None:
        return {}
    accept = _within(points.accept_us, 0, end)
    tokenized = _within(points.tokenized_us, accept, end)
    submitted = _within(points.submitted_us, tokenized, end)
    work = _fit((stages.queue_ms, stages.kv_load_ms, stages.compute_ms), end - submitted)
    parts = (accept, tokenized - accept, submitted - tokenized, *work, end - submitted - sum(work))
    return dict(zip(TTFT_PARTS, parts, strict=True))


def rest_parts(points: Points, stages: Stages) -> dict[str, int]:
    """Microseconds of each of `REST_PARTS`; their sum is ``done_us − first_byte_us``. Empty before the end."""
    if points.first_byte_us is None or points.done_us is None:
        return {}
    rest = max(0, points.done_us - points.first_byte_us)
    exposed = min(_us(stages.transfer_exposed_ms), rest)
    wait = min(_us(stages.wait_ms), rest - exposed)
    return dict(zip(REST_PARTS, (exposed, wait, rest - exposed - wait), strict=True))


def _us(ms: float) -> int:
    return max(0, round(ms * 1000)) if ms < 1e12 else 10**15


def _within(value: int | None, low: int, high: int) -> int:
    """``value`` moved into low..high; a point that was never marked takes no time after the one before it."""
    return low if value is None else min(max(value, low), high)


def _fit(durations_ms: tuple[float, ...], room_us: int) -> list[int]:
    us = [_us(d) for d in durations_ms]
    total = sum(us)
    return us if total <= room_us else [d * room_us // total for d in us]
