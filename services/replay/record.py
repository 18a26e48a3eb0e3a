"""What is replayed, and what became of each request."""

from __future__ import annotations

from dataclasses import dataclass

from services.replay.costs import CostModel
from services.replay.decode import Answer
from services.replay.prefill import Prompt
from services.replay.traffic import BLOCK_TOKENS, Arrival
from services.router.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is replayed on what."""

    policy: str = "cost"
    prefill: int = 16
    decode: int = 16
    costs: CostModel
    seed: int = 0
    pulls: bool = True
    block_size: int = BLOCK_TOKENS


@dataclass(slots=True, kw_only=True)
class Record:
    """One request and what became of it; seconds of the virtual clock, −1: never."""

    arrival: Arrival
    plan: Plan | None = None  # None: no pair could hold it
    placed_s: float = -1.0
    granted_s: float = -1.0
    first_token_s: float = -1.0
    joined_s: float = -1.0
    end_s: float = -1.0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    missing_tokens: int = 0  # that the decode worker lacked
    prompt: Prompt | None = None
    answer: Answer | None = None

    @property
    def request_id(self) -> str:
        return str(self.arrival.number)

    @property
    def pair(self) -> tuple[str, str]:
        assert self.plan is not None
        return self.plan.prefill_id, self.plan.decode_id

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_token_s - self.arrival.at_s)

    @property
    def tpot_ms(self) -> float:
        """Mean gap between tokens, the hand-off's included; 0 for a single token."""
        gaps = self.arrival.output_tokens - 1
        return 1000 * (self.end_s - self.first_token_s) / gaps if gaps else 0.0
