"""Between the protocol's messages and the engine's: no state, no decision."""

from __future__ import annotations

from services.engine import messages as m
from services.protocol.errors import RequestError
from services.protocol.grammar import GrammarSpec
from services.protocol.proto import worker_pb2
from services.worker.live import LiveRequest


def to_error(error: RequestError) -> worker_pb2.Error:
    return worker_pb2.Error(code=str(error.code), message=error.message, retryable=error.status.retryable)


def to_sequence(live: LiveRequest, *, hand_off: bool, tells_prompt: bool = True) -> m.AddSequence:
    """The request as the engine takes it. ``tells_prompt``: logprobs of the prompt are this worker's to tell."""
    r, names = live.request, live.request.block_names
    return m.AddSequence(
        seq_id=live.seq_id,
        prompt_ids=tuple(r.prompt_ids),
        output_ids=tuple(r.output_ids),
        block_names=tuple(names[i : i + 16] for i in range(0, len(names), 16)),
        root=r.root_digest,
        hand_off=hand_off,
        priority=r.priority,
        n=live.num_choices,
        sampling=_sampling(r.sampling, tells_prompt=tells_prompt),
    )


def _sampling(s: worker_pb2.Sampling, *, tells_prompt: bool) -> m.Sampling:
    p = s.penalties
    return m.Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        ignore_eos=s.ignore_eos,
        stop_token_ids=tuple(s.stop_token_ids),
        min_p=s.min_p,
        penalties=m.Penalties(presence=p.presence, frequency=p.frequency, repetition=p.repetition)
        if s.HasField("penalties")
        else None,
        logit_bias=tuple(sorted(s.logit_bias.items())),
        logprobs=s.logprobs if s.HasField("logprobs") else -1,
        prompt_logprobs=s.prompt_logprobs if tells_prompt and s.HasField("prompt_logprobs") else -1,
        grammar=GrammarSpec(kind=s.grammar.kind, text=s.grammar.text) if s.HasField("grammar") else None,
    )


def to_logprobs(told: m.TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=told.logprob, rank=told.rank, top_ids=told.top_ids, top_logprobs=told.top_logprobs
    )


def from_logprobs(told: worker_pb2.TokenLogprobs) -> m.TokenLogprobs:
    return m.TokenLogprobs(
        logprob=told.logprob, rank=told.rank, top_ids=tuple(told.top_ids), top_logprobs=tuple(told.top_logprobs)
    )


def to_output(live: LiveRequest, output: m.SequenceOutput, times: worker_pb2.StageTimes | None) -> worker_pb2.Output:
    """One choice's part of a step as the router takes it."""
    return worker_pb2.Output(
        request_id=live.request.request_id,
        attempt=live.request.attempt,
        position=output.position,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        cached_tokens=output.cached_tokens,
        times=times,
        choice=output.choice,
        logprobs=[to_logprobs(x) for x in output.logprobs],
        prompt_start=output.prompt_start,
        prompt_logprobs=[to_logprobs(x) for x in output.prompt_logprobs],
    )
