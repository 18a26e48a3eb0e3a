"""One request inside the engine, and where it stands.

    add ──────► WAITING ── place ──► RUNNING ── end ──────────────────────────────────────► gone
                   ▲                  │  │  ▲
                   └──── preempt ─────┘  │  └──── start ──── RESERVED ◄── place ── RESERVING ◄── reserve
                                         └─ token 1 of a hand-off ──► HELD ── release ──► gone

Any state ends by an abort. WAITING and RESERVING hold no blocks, all others do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.engine.messages import AddSequence, Sampling


class Phase(StrEnum):
    WAITING = "waiting"  # for blocks or for the token budget
    RUNNING = "running"  # computed step by step
    RESERVING = "reserving"  # waits for blocks that a peer will fill
    RESERVED = "reserved"  # a peer fills its blocks
    HELD = "held"  # token 1 is out; its blocks stay until they are released


LEGAL = {
    Phase.WAITING: {Phase.RUNNING},
    Phase.RUNNING: {Phase.WAITING, Phase.HELD},
    Phase.RESERVING: {Phase.RESERVED},
    Phase.RESERVED: {Phase.RUNNING},
    Phase.HELD: set(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler; others read it. ``token_ids`` is the prompt and all outputs."""

    seq_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_given_tokens: int  # prompt, and outputs that came with the request
    sampling: Sampling
    root: bytes
    names: list[bytes]  # of full blocks, as far as known
    priority: int
    arrival: int  # counts up; equal priorities go in this order
    hand_off: bool
    phase: Phase
    num_computed_tokens: int = 0  # leading tokens whose KV is in this sequence's blocks
    num_known_tokens: int = 0  # leading tokens whose KV was computed before, here or by the writer
    block_ids: list[int] = field(default_factory=list)
    num_named_blocks: int = 0
    cached_tokens: int = 0  # of the prompt, found before anything was computed
    was_placed: bool = False
    num_overtaken: int = 0  # placements of later ones while this one did not fit
    last_turn: int = 0  # when it was last computed, counted in works

    @classmethod
    def of(cls, message: AddSequence, arrival: int, phase: Phase) -> Sequence:
        given = [*message.prompt_ids, *message.output_ids]
        return cls(
            seq_id=message.seq_id,
            token_ids=given,
            num_prompt_tokens=len(message.prompt_ids),
            num_given_tokens=len(given),
            sampling=message.sampling,
            root=message.root,
            names=list(message.block_names),
            priority=message.priority,
            arrival=arrival,
            hand_off=message.hand_off,
            phase=phase,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Lower goes first, and is preempted last."""
        return self.priority, self.arrival

    def advance(self, phase: Phase) -> None:
        assert phase in LEGAL[self.phase], f"{self.seq_id}: {self.phase} to {phase}"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes of one sequence: tokens start .. start + count - 1."""

    sequence: Sequence
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """The next token comes out of this step."""
        return self.stop == self.sequence.num_tokens

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.start >= self.sequence.num_given_tokens
