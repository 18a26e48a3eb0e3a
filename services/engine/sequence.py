"""One request inside the engine, and where it stands.

    add ──────► WAITING ── place ──► RUNNING ── end ──────────────────────────────────────► gone
                 │ ▲                  │  │  ▲
                 │ └──── preempt ─────┘  │  └──── start ──── RESERVED ◄── place ── RESERVING ◄── reserve
                 │                       └─ token 1 of a hand-off ──► HELD ── release ──► gone
                 └─ place, and a source has more of it ─► LOADING ─┬─ loaded, wholly or in part ─► RUNNING
                                                                   └─ a write may still land ─► WAITING, other blocks

Any state ends by an abort. WAITING and RESERVING hold no blocks, all others do.

A request for n choices is one sequence up to token 1, and n sequences over the same blocks from then on. Choices that
bring outputs of their own along go through WAITING there, as if they were preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from services.engine.messages import AddSequence, Sampling

PEER = "peer"
"""Source of what another worker of this application writes."""


class Phase(StrEnum):
    WAITING = "waiting"  # for blocks or for the token budget
    RUNNING = "running"  # computed step by step
    LOADING = "loading"  # a peer or a tier fills blocks of its prompt; it is neither computed nor preempted
    RESERVING = "reserving"  # waits for blocks that a peer will fill
    RESERVED = "reserved"  # a peer fills its blocks
    HELD = "held"  # token 1 is out; its blocks stay until they are released


LEGAL = {
    Phase.WAITING: {Phase.RUNNING, Phase.LOADING},
    Phase.LOADING: {Phase.RUNNING, Phase.WAITING},
    Phase.RUNNING: {Phase.WAITING, Phase.HELD},
    Phase.RESERVING: {Phase.RESERVED},
    Phase.RESERVED: {Phase.RUNNING},
    Phase.HELD: set(),
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Owned by the scheduler; others read it. ``token_ids`` is the prompt and all outputs."""

    seq_id: str
    group_id: str  # of the message that it came with; the seq_id of its first choice
    choices: tuple[int, ...]  # that it is computed for: of the whole group up to token 1, then one
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
    was_started: bool = False  # its first chunk has been announced
    offered_blocks: int = 0  # leading full blocks that a source has, as last heard
    offered_by: str = ""
    load_blocks: int = 0  # while LOADING: so many behind the named ones are being filled
    num_saved_blocks: int = 0  # leading ones that the tier has, or was given
    may_load: bool = True  # no load for it has come short
    pools: bool = False  # it ends with its prompt, all of it computed here: so its blocks have no names
    num_overtaken: int = 0  # placements of later ones while this one did not fit
    last_turn: int = 0  # when it was last computed, counted in works
    rank: int = 0  # what the policy puts before arrival in `order`
    waits_since: int = 0  # tokens computed by the engine when it came or gave its last token
    is_aged: bool = False  # has waited for the ageing bound, and goes first from then on
    has_claimed: bool = False  # has had its one chance to preempt others in order to start
    was_held_back: bool = False  # would have fitted but for the admission watermark
    expected_blocks: int = 0  # that admission counts on for it, output included; 0: it has no reservation
    num_hit_blocks: int = 0  # found in the prefix cache when last looked up
    parting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Outputs that came with the request, by choice, where several share the prompt: what each goes on with."""
    order: tuple[bool, int, int] = field(init=False)
    """Lower goes first, and is preempted last: aged ones, then by rank, then by arrival."""

    def __post_init__(self) -> None:
        self.order = (not self.is_aged, 0 if self.is_aged else self.rank, self.arrival)

    @classmethod
    def of(cls, message: AddSequence, arrival: int, phase: Phase, rank: int = 0) -> Sequence:
        parting = dict(message.outputs)
        own = next(iter(parting.values())) if len(parting) == 1 else message.output_ids
        given = [*message.prompt_ids, *own]
        return cls(
            seq_id=message.seq_id,
            group_id=message.seq_id,
            choices=tuple(sorted(parting)) or tuple(range(message.n)),
            token_ids=given,
            num_prompt_tokens=len(message.prompt_ids),
            num_given_tokens=len(given),
            sampling=message.sampling,
            root=b"" if message.pools else message.root,
            names=[] if message.pools else list(message.block_names),
            priority=message.priority,
            arrival=arrival,
            hand_off=message.hand_off,
            phase=phase,
            rank=rank,
            offered_blocks=message.offered_blocks,
            offered_by=PEER if message.offered_blocks else "",
            pools=message.pools,
            parting=parting if len(parting) > 1 else {},
        )

    def fork(self, choice: int) -> Sequence:
        """The same tokens for one more choice, WAITING and without blocks; its place is right behind this one."""
        return replace(
            self,
            seq_id=_key(self.group_id, choice),
            choices=(choice,),
            token_ids=list(self.token_ids),
            names=list(self.names),
            arrival=self.arrival + choice,
            phase=Phase.WAITING,
            num_computed_tokens=0,
            block_ids=[],
            num_named_blocks=0,
            offered_blocks=0,
            parting={},
        )

    def take_parting(self, tokens: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """What each choice goes on with: outputs that it brought along, else the token drawn for it. They are taken
        once."""
        parting, self.parting = self.parting, {}
        return {choice: parting.get(choice) or (tokens[choice],) for choice in self.choices}

    @property
    def choice(self) -> int:
        """The first of its choices."""
        return self.choices[0]

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

    def age(self) -> None:
        """It has waited for the ageing bound. It stays aged, so that it is not stopped again before it ends."""
        self.is_aged = True
        self.order = (False, 0, self.arrival)

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
        """The next token comes out of this step, or what is pooled."""
        return self.stop == self.sequence.num_tokens

    @property
    def draws(self) -> list[tuple[str, int]]:
        """(key, choice) of each token that comes out of this step; the key of a sequence's first choice is its id."""
        seq = self.sequence
        if self.start + self.count != len(seq.token_ids) or seq.pools:
            return []
        if len(seq.choices) == 1:
            return [(seq.seq_id, seq.choices[0])]
        return [(seq.seq_id, seq.choice), *((_key(seq.group_id, c), c) for c in seq.choices[1:])]

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.start >= self.sequence.num_given_tokens


def _key(group_id: str, choice: int) -> str:
    return f"{group_id}#{choice}"
