"""What crosses the pipe between a worker's service process and its engine child.

Each message is a dataclass of this module, carried by `kvstore.wire.Codec`; nothing else crosses. All are frozen but
`SequenceOutput`: the step loop makes one for every token, and a frozen one takes four times as long to make.

    service ──► engine                              engine ──► service
    AddSequence     compute a prompt (and decode)   EngineReady      the model is loaded
    ReserveSequence hold blocks for KV to come      Reserved | ReserveRefused
    StartSequence   the KV is verified, decode      PrefillStarted   first chunk is scheduled
    ReleaseSequence let its blocks go               StepDone         one for each step
    AbortSequence                                   Steps
    PinBlocks       hold what the cache has         Pinned
    Loaded          a peer has written what was     LoadWanted       a peer may write these blocks
                    wanted, or could not         LoadEnded        blocks were loaded, or were not
    Unquarantine    fenced: reuse is safe
    GetSteps, Stop
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.wire import Codec
from services.protocol.grammar import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What tokens lose for having come before; see `services.engine.penalties`."""

    presence: float = 0.0  # once, if among the outputs
    frequency: float = 0.0  # for each time among the outputs
    repetition: float = 1.0  # a factor, if in the prompt or among the outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # <= 0 = off
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one never come
    penalties: Penalties | None = None  # None: there are none
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what its logit gains)
    logprobs: int = -1  # how many of the likeliest tokens to tell with each output; -1: no logprobs at all
    prompt_logprobs: int = -1  # the same of each prompt token but the first
    grammar: GrammarSpec | None = None  # what the answer must look like


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSequence:
    """Compute ``prompt_ids``, and ``output_ids`` that exist already; the next token is drawn behind them.

    With ``n`` the prompt is computed once, and so many answers are drawn; choice i of an answer depends on (seed, i)
    alone. Several choices that have ``outputs`` part behind the prompt, each with its own, and compute these by
    themselves; the first token of each is told once more, not drawn. With ``hand_off`` stop after token 1 and hold the
    blocks until ReleaseSequence, also where token 1 or an error ends it; else decode to the end.
    """

    seq_id: str  # unique in this process
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    root: bytes
    block_names: tuple[bytes, ...] = ()  # of the prompt's full blocks
    output_ids: tuple[int, ...] = ()
    outputs: tuple[tuple[int, tuple[int, ...]], ...] = ()  # the same with n > 1: (choice, ids) of those that go on
    hand_off: bool = False
    priority: int = 0
    salt: str = ""
    n: int = 1
    offered_blocks: int = 0  # leading full blocks of the prompt that a peer offers to write; see LoadWanted
    pools: bool = False  # draw nothing: the output is the mean of the prompt's last hidden states, see `engine.pooling`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSequence:
    """Hold blocks for a prompt whose KV another worker will write. Answered by Reserved, as soon as there is room, or
    ReserveRefused, at once, where there never will be."""

    sequence: AddSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSequence:
    """All blocks of a reserved sequence are verified: name them, and decode each choice from its first token on."""

    seq_id: str
    first_tokens: tuple[tuple[int, int], ...]  # (choice, token id) of those that go on; others are over
    first_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (choice, …), where they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortSequence:
    """End a sequence in any state. With ``quarantine`` its blocks are not reused before Unquarantine.

    With a ``choice`` end that one alone, without an output; a hand-off holds all of them until it is released.
    """

    seq_id: str
    quarantine: bool = False
    choice: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSequence:
    """The hand-off is over: drop the writer's hold. The prompt's named blocks stay in the prefix cache."""

    seq_id: str
    quarantine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unquarantine:
    """A peer is fenced. Each message with ``quarantine`` is ended by one of these; the last one of a sequence's frees
    its blocks."""

    seq_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinBlocks:
    """Hold the leading blocks of these names that are in the prefix cache, until ReleaseSequence(seq_id); answered by
    Pinned. A peer reads them meanwhile."""

    seq_id: str
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The answer to LoadWanted: the first ``count`` of the wanted blocks hold verified KV. With ``quarantine`` a write
    may still land in any of them: they are not reused before Unquarantine, none counts; the sequence gets others."""

    seq_id: str
    count: int
    quarantine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSteps:
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    pid: int
    geometry: dict[str, Any]  # KVGeometry.to_dict()
    num_blocks: int
    max_model_len: int
    dtype: str
    vocab_size: int
    attention: str
    path: str = ""  # how the model is computed: fused:…, generic:…
    path_note: str = ""  # why not faster
    hidden_size: int = 0  # of the states that can be pooled; 0: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    seq_id: str
    block_ids: tuple[int, ...]  # one for each block of the prompt, tail included
    cached_blocks: int  # leading ones whose content is here already


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused:
    seq_id: str
    code: str  # services.protocol.errors.ErrorCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    """Sent before the step that computes the first chunk runs."""

    seq_id: str
    block_ids: tuple[int, ...]  # one for each block of the prompt, tail included
    cached_blocks: int  # leading ones computed before this request


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    seq_id: str
    block_ids: tuple[int, ...]  # of the leading names that are here; may be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWanted:
    """A sequence got blocks, and a peer has offered what ``block_ids[first : first + count]`` should hold. Nothing of
    it is computed until Loaded comes, or the sequence ends. It may never come: PrefillStarted does then."""

    seq_id: str
    block_ids: tuple[int, ...]  # one for each block of the prompt, tail included
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnded:
    """A load for a sequence is over: of ``wanted`` blocks the first ``count`` were filled, the rest is computed."""

    seq_id: str
    source: str  # peer, or a tier's name
    wanted: int
    count: int
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely the model found one token, before anything was done to its logits; natural logarithms."""

    logprob: float
    rank: int  # 1 = no other token was likelier
    top_ids: tuple[int, ...] = ()  # the likeliest first
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one sequence produced in one step; an empty token list with a finish reason ends it without a token, and one
    without a finish reason only brings logprobs of the prompt. Nobody changes it once it is sent."""

    seq_id: str
    position: int  # index of token_ids[0] among the output tokens
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # "" | stop | length | error | abort
    error_code: str = ""
    error: str = ""
    cached_tokens: int = 0
    choice: int = 0
    queue_ms: float = 0.0  # accepted by the engine .. first scheduled
    compute_ms: float = 0.0  # first scheduled .. this token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where they were asked for
    prompt_start: int = 0  # index of the prompt token that prompt_logprobs[0] is about
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""  # float32, of a sequence that pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since start and gauges now. Token counters come from the batches that the runner executed."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_reserved: int = 0
    blocks_quarantined: int = 0
    prompt_tokens_computed: int = 0  # prompt tokens forwarded, recomputed ones left out
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    decode_tokens_forwarded: int = 0
    tokens_recomputed: int = 0
    tokens_forwarded: int = 0  # prompt_tokens_computed + decode_tokens_forwarded + tokens_recomputed
    preemptions: int = 0
    prefill_tokens_per_s: float = 0.0  # EWMA
    step_ms: float = 0.0  # EWMA of steps that decode only
    kv_unused_tokens: int = 0  # slots of running sequences' last blocks behind the last token
    kv_unwritten_blocks: int = 0  # held for prompts or by reserves, and not written yet
    output_mispredictions: int = 0  # sequences that outgrew what admission had set aside for them
    admissions_held_back: int = 0  # sequences that the admission watermark alone has stopped
    cached_by_source: tuple[tuple[str, int], ...] = ()  # prompt_tokens_cached by where they were: device, peer, a tier
    loads_failed: int = 0  # loads of blocks that brought less than was offered


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEvents:
    """Names that a tier behind the pool came to keep, and lost; ``is_lost``: all of them, it failed."""

    tier: int = 0
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    outputs: tuple[SequenceOutput, ...]
    stored: tuple[tuple[bytes, bytes], ...]  # (name, parent name or root) of blocks now cached
    removed: tuple[bytes, ...]
    stats: Stats
    tier: TierEvents | None = None  # what is new there

    def changes(self) -> Iterator[tuple[Sequence[bytes], Sequence[bytes], int, bool]]:
        """Stored names, removed names, tier (0: the device), whether all that it had before is lost."""
        if self.stored or self.removed:
            yield [name for name, _parent in self.stored], self.removed, 0, False
        if self.tier is not None:
            yield self.tier.stored, self.tier.removed, self.tier.tier, self.tier.is_lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    json: str


CODEC = Codec(
    (
        GrammarSpec, Penalties, TokenLogprobs,
        Sampling, AddSequence, ReserveSequence, StartSequence, AbortSequence, ReleaseSequence, Unquarantine, PinBlocks,
        Loaded, GetSteps, Stop, EngineReady, Reserved, ReserveRefused, PrefillStarted, Pinned, LoadWanted, LoadEnded,
        SequenceOutput, Stats, TierEvents, StepDone, Steps,
    )
)  # fmt: skip
