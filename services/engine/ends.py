"""How a sequence ends, and what is said of it: outputs as they leave the engine."""

from __future__ import annotations

from services.engine.intake import Limits
from services.engine.messages import SequenceOutput
from services.engine.sequence import Sequence
from services.protocol.errors import ErrorCode


def finish_reason(seq: Sequence, token_id: int, limits: Limits) -> str:
    """Why the sequence ends if this is its next token; empty where it goes on."""
    num_tokens, sampling = len(seq.token_ids), seq.sampling
    num_outputs = num_tokens - seq.num_prompt_tokens
    may_end = num_outputs >= sampling.min_tokens or sampling.grammar is not None
    if may_end and limits.ends(token_id, sampling):
        return "stop"
    if num_outputs + 1 >= sampling.max_tokens or num_tokens + 1 >= limits.max_model_len:
        return "length"
    return ""


def output_of(seq: Sequence, choice: int, token_id: int, reason: str) -> SequenceOutput:
    """The next token of one choice, which ends with it where there is a ``reason``."""
    return SequenceOutput(
        seq_id=seq.group_id,
        position=seq.num_outputs,
        token_ids=(token_id,),
        finish_reason=reason,
        cached_tokens=seq.cached_tokens,
        choice=choice,
    )


def pooled_of(seq: Sequence) -> SequenceOutput:
    """The end of a sequence that pools; the states themselves are not the scheduler's."""
    return SequenceOutput(seq_id=seq.group_id, position=0, token_ids=(), finish_reason="stop")


def failure_of(seq: Sequence, message: str) -> SequenceOutput:
    """The end of a sequence that cannot go on."""
    return SequenceOutput(
        seq_id=seq.group_id,
        position=seq.num_outputs,
        token_ids=(),
        finish_reason="error",
        error_code=ErrorCode.INTERNAL.value,
        error=message,
        cached_tokens=seq.cached_tokens,
        choice=seq.choice,
    )
