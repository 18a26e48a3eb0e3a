"""What is kept of each request, and the latencies that follow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request, seen from the client. Times are monotonic seconds; None: never happened, or not told."""

    index: int
    due_s: float  # the scheduled send; in a closed loop, when the user was free to send
    sent_s: float
    first_s: float | None = None  # first chunk with text; where none has any, the one that ends the answer
    last_s: float | None = None  # last chunk with a choice
    done_s: float  # the answer was over, or it failed
    lag_s: float | None = None  # the tool's own delay; None where a concurrency cap made the request wait
    chunks: int = 0  # chunks with text
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between chunks with text
    input_tokens: int | None = None  # this and the next two from the server's usage
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""  # "" is no failure; else `kind: what was seen`
    is_cancelled: bool = False  # the client hung up as planned: neither a success nor a failure
    answer_id: str = ""
    tenant: str = ""

    @property
    def ok(self) -> bool:
        """A success: answered to its end, without an error."""
        return not self.error and not self.is_cancelled

    @property
    def error_kind(self) -> str:
        return self.error.partition(":")[0]

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled send; None for an answer without tokens."""
        if self.first_s is None or self.output_tokens == 0:
            return None
        return self.first_s - self.due_s

    @property
    def e2el_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for one token or none, and where one chunk held all."""
        tokens = self.output_tokens
        if tokens is None or tokens < 2 or self.chunks < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (tokens - 1)

    @property
    def service_ttft_s(self) -> float | None:
        """As `ttft_s`, from the actual send: without what the client waited."""
        ttft = self.ttft_s
        return None if ttft is None else ttft - (self.sent_s - self.due_s)

    @property
    def service_e2el_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.sent_s
