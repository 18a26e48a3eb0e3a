"""What a tenant may take: requests and tokens by the minute, and requests at once.

A bucket holds a minute's worth and fills at an even rate. Requests are taken when they come, prompt tokens once they
are counted, answer tokens as they are given out; those may bring a bucket below zero, and who comes next waits until it
is paid back. So a running answer is never cut, and over any T seconds no more than (60 + T) seconds' worth is begun.
Clocks are arguments. Each router counts for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.protocol.errors import ErrorCode, RequestError

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""Advised where too many requests run: nobody knows when one ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    def or_else(self, other: Limits) -> Limits:
        """These limits, and where there is none, the other ones'."""
        return Limits(
            requests_per_minute=self.requests_per_minute or other.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute or other.tokens_per_minute,
            concurrency=self.concurrency or other.concurrency,
        )


NO_LIMITS = Limits()


class Bucket:
    """A token bucket. ``capacity`` is what a minute brings; it starts full."""

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What can be taken now; negative while a debt is open."""
        gained = max(0.0, now_s - self._at_s) * self.capacity / MINUTE_S
        return min(float(self.capacity), self._level + gained)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount``, at most the capacity, could be taken; 0: now."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.capacity)

    def take(self, amount: float, now_s: float) -> None:
        """Take it, whether it is there or not; a negative amount gives back."""
        self._level = min(float(self.capacity), self.level(now_s) - amount)
        self._at_s = max(self._at_s, now_s)

    def full_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return (self.capacity - self.level(now_s)) * MINUTE_S / self.capacity


class Meter:
    """What one tenant, or one key, has taken of its limits."""

    def __init__(self, name: str, limits: Limits, now_s: float) -> None:
        """``name`` is how a refusal calls it: "tenant 'a'"."""
        self.name = name
        self.running = 0
        self.limits = NO_LIMITS
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.set_limits(limits, now_s)

    def set_limits(self, limits: Limits, now_s: float) -> None:
        """New limits; a bucket whose limit stays keeps its level."""
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_s)
        self.limits = limits

    def refusal(self, now_s: float) -> RequestError | None:
        """Why one more request cannot begin now; None where it can."""
        limits = self.limits
        if limits.concurrency and self.running >= limits.concurrency:
            message = f"{self.name} has {self.running} requests running, its limit is {limits.concurrency}"
            return _limited(message + " (concurrency)", CONCURRENCY_RETRY_S)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            message = f"{self.name} may send {limits.requests_per_minute} requests a minute (requests_per_minute"
            return _limited(f"{message}); the next one in {wait_s:.3g} s", wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)):
            message = f"{self.name} may use {limits.tokens_per_minute} tokens a minute (tokens_per_minute"
            return _limited(f"{message}); there are some again in {wait_s:.3g} s", wait_s)
        return None

    def prompt_refusal(self, tokens: int, now_s: float) -> RequestError | None:
        """Why a prompt of so many tokens cannot be taken now; None where it can."""
        if self.tokens is None:
            return None
        limit = self.tokens.capacity
        if tokens > limit:
            message = f"the prompt has {tokens} tokens, {self.name} may use {limit} a minute (tokens_per_minute)"
            return _limited(message, None)
        if wait_s := self.tokens.wait_s(tokens, now_s):
            left = max(0, int(self.tokens.level(now_s)))
            message = f"the prompt has {tokens} tokens, {self.name} has {left} left of {limit} a minute"
            return _limited(f"{message} (tokens_per_minute); send it in {wait_s:.3g} s", wait_s)
        return None


def _bucket(old: Bucket | None, capacity: int, now_s: float) -> Bucket | None:
    if not capacity:
        return None
    return old if old is not None and old.capacity == capacity else Bucket(capacity, now_s)


def _limited(message: str, retry_after_s: float | None) -> RequestError:
    return RequestError(ErrorCode.RATE_LIMITED, message, retry_after_s=retry_after_s)


def headers(meters: Iterable[Meter], now_s: float) -> dict[str, str]:
    """OpenAI's x-ratelimit-* headers, of the meter that has least left; empty where nothing is limited."""
    found: dict[str, str] = {}
    for what in ("requests", "tokens"):
        buckets: list[Bucket] = [b for meter in meters if (b := getattr(meter, what)) is not None]
        if not buckets:
            continue
        least = min(buckets, key=lambda bucket: bucket.level(now_s))
        found[f"x-ratelimit-limit-{what}"] = str(least.capacity)
        found[f"x-ratelimit-remaining-{what}"] = str(max(0, int(least.level(now_s))))
        found[f"x-ratelimit-reset-{what}"] = duration(least.full_s(now_s))
    return found


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 120ms."""
    ms = max(0, round(seconds * 1000))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
