"""What a choice is made of: a prompt, workers, a fabric; and what it is: candidates, a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.router.loads import LoadCost

Draws = tuple[float, float, float, float]
"""Uniform numbers in [0, 1) for policies that choose by chance."""
NO_DRAWS: Draws = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy needs of a request."""

    num_tokens: int
    block_size: int
    token_bytes: int  # KV of one token over all layers
    num_layers: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, tail included."""
        return -(-self.num_tokens // self.block_size)

    @property
    def reusable_blocks(self) -> int:
        """Leading blocks that may come from a cache: the last token is always computed."""
        return (self.num_tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker that may be chosen, with the router's bookings already counted in."""

    worker_id: str
    role: str  # prefill | decode | mixed
    cached_blocks: int = 0  # leading blocks of this prompt that it holds
    queued_tokens: int = 0  # prompt tokens to compute before this request
    prefill_tokens_per_s: float = 1000.0
    active_sequences: int = 0
    step_ms: float = 10.0  # of a decode step
    free_blocks: int = 0  # free or evictable now; negative when overbooked
    num_blocks: int = 0
    full_share: float = 0.0  # of its pool, that holds something: there a new block takes the place of another
    transport: str = ""  # KV is loaded only from a worker with the same one
    tier_blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Leading blocks that a load from each of its lower tiers (host, disk, store) could complete, where that is more
    than ``cached_blocks``."""


Pair = tuple[Worker, Worker]
"""Who computes the prompt and who decodes; a mixed worker twice."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Milliseconds of each term."""

    queue_ms: float
    compute_ms: float
    transfer_ms: float
    admission_ms: float
    pressure_ms: float
    load_ms: float = 0.0
    delay_ms: float = 0.0
    copy_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        computed_ms = self.queue_ms + self.load_ms + self.compute_ms
        return computed_ms + self.transfer_ms + (self.admission_ms + self.pressure_ms) + (self.delay_ms + self.copy_ms)

    @property
    def time_ms(self) -> float:
        """Of this request alone: without the prices of what it does to others."""
        return self.queue_ms + self.load_ms + self.compute_ms + self.transfer_ms + self.admission_ms


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair, or one mixed worker (``decode_id`` is ""); ``holder_id``: who writes KV to the prefill worker first."""

    prefill_id: str
    decode_id: str
    terms: Terms
    holder_id: str = ""
    held_blocks: int = 0  # leading ones that the holder has


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice and why: what else there was, cheapest first, and what each term came to."""

    policy: str
    choice: Candidate
    candidates: tuple[Candidate, ...]
    considered: int  # candidates there were before the list was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How fast KV moves between workers, bytes per second."""

    default_bytes_per_s: float = 1e9
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)
    pull_setup_ms: float | None = None  # of loading KV from another worker; None: it is never loaded
    loads: Mapping[tuple[str, str], LoadCost] = field(default_factory=dict)  # learned, by holder and reader
    fastest_bytes_per_s: float = float("inf")  # at least what the fastest way has, as assumed, measured or learned

    def bandwidth(self, writer_id: str, reader_id: str) -> float:
        return max(self.measured.get((writer_id, reader_id), self.default_bytes_per_s), 1.0)

    def load_cost(self, holder_id: str, reader_id: str) -> LoadCost:
        """As learned, else as assumed: the set-up, and the bandwidth of a hand-off that way."""
        known = self.loads.get((holder_id, reader_id))
        if known is not None:
            return known
        return LoadCost(setup_ms=self.pull_setup_ms or 0.0, bytes_per_s=self.bandwidth(holder_id, reader_id))


def uncached_tokens(prompt: Prompt, cached_blocks: int) -> int:
    """Prompt tokens to compute on a worker that holds the first ``cached_blocks`` blocks."""
    return prompt.num_tokens - min(cached_blocks, prompt.reusable_blocks) * prompt.block_size
