"""Who calls, as the fronts see it, and what a call takes of the caller's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.router.access.keys import SCOPES
from services.router.access.limits import Meter, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key of the file, or `ANONYMOUS`. ``tenant`` owns cached KV and limits."""

    name: str = ""
    tenant: str = ""
    scopes: frozenset[str] = frozenset(SCOPES)
    meters: tuple[Meter, ...] = ()

    @contextmanager
    def running(self, clock: Callable[[], float]) -> Iterator[None]:
        """One request of this caller; counted for as long as the block runs.

        Raises:
            RequestError: RATE_LIMITED, and nothing was taken.
        """
        now_s = clock()
        for meter in self.meters:
            if (refusal := meter.refusal(now_s)) is not None:
                raise refusal
        for meter in self.meters:
            meter.running += 1
            if meter.requests is not None:
                meter.requests.take(1, now_s)
        try:
            yield
        finally:
            for meter in self.meters:
                meter.running -= 1

    def take_prompt(self, tokens: int, now_s: float) -> None:
        """Count a prompt that is about to be computed.

        Raises:
            RequestError: RATE_LIMITED, and nothing was taken.
        """
        for meter in self.meters:
            if (refusal := meter.prompt_refusal(tokens, now_s)) is not None:
                raise refusal
        self.take_output(tokens, now_s)

    def take_output(self, tokens: int, now_s: float) -> None:
        """Count tokens of an answer; never refused."""
        for meter in self.meters:
            if meter.tokens is not None:
                meter.tokens.take(tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers."""
        return headers(self.meters, now_s)


ANONYMOUS = Caller()
"""Everybody, where no keys file is set."""
