"""Between the protocol's messages and the engine's: no state, no decision."""

from __future__ import annotations

from typing import Any

from services.engine import messages as m
from services.protocol.errors import RequestError
from services.protocol.grammar import GrammarSpec
from services.protocol.proto import worker_pb2
from services.worker.live import LiveRequest


def to_error(error: RequestError) -> worker_pb2.Error:
    return worker_pb2.Error(code=str(error.code), message=error.message, retryable=error.status.retryable)


def to_sequence(
    live: LiveRequest, *, hand_off: bool, tells_prompt: bool = True, offered_blocks: int = 0
) -> m.AddSequence:
    """The request as the engine takes it. ``tells_prompt``: logprobs of the prompt are this worker's to tell;
    ``offered_blocks``: leading ones that a peer could write here."""
    r, names = live.request, live.request.block_names
    return m.AddSequence(
        seq_id=live.seq_id,
        prompt_ids=tuple(r.prompt_ids),
        output_ids=tuple(r.output_ids),
        outputs=tuple((o.choice, tuple(o.token_ids)) for o in r.outputs),
        block_names=tuple(names[i : i + 16] for i in range(0, len(names), 16)),
        root=r.root_digest,
        hand_off=hand_off,
        priority=r.priority,
        n=live.num_choices,
        offered_blocks=offered_blocks,
        pools=r.pools,
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
        pooled=output.pooled,
    )


def to_load(stats: m.Stats, **others: Any) -> worker_pb2.Load:
    """The engine's statistics as routers see them; ``others``: what the worker counts itself."""
    return worker_pb2.Load(
        step=stats.step,
        running=stats.running,
        waiting=stats.waiting,
        waiting_prefill_tokens=stats.waiting_prefill_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_used=stats.blocks_used,
        blocks_cached=stats.blocks_cached,
        blocks_reserved=stats.blocks_reserved,
        blocks_quarantined=stats.blocks_quarantined,
        prompt_tokens_computed=stats.prompt_tokens_computed,
        prompt_tokens_cached=stats.prompt_tokens_cached,
        tokens_generated=stats.tokens_generated,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        step_ms=stats.step_ms,
        tokens_forwarded=stats.tokens_forwarded,
        tokens_recomputed=stats.tokens_recomputed,
        decode_tokens_forwarded=stats.decode_tokens_forwarded,
        preemptions=stats.preemptions,
        kv_unused_tokens=stats.kv_unused_tokens,
        kv_unwritten_blocks=stats.kv_unwritten_blocks,
        output_mispredictions=stats.output_mispredictions,
        admissions_held_back=stats.admissions_held_back,
        loads_failed=stats.loads_failed,
        cached_by_source=dict(stats.cached_by_source),
        **others,
    )
