"""From a client's request to what goes to a worker: checks, names, the choice, and the protobuf messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.blocks import block_names
from services.config import BudgetConfig
from services.protocol.errors import ErrorCode, RequestError, invalid
from services.protocol.proto import worker_pb2
from services.router.bookings import Booking
from services.router.compat import Kind
from services.router.fabric import FabricMeter
from services.router.links import RouterIdentity
from services.router.policy import Decision, Fabric, Prompt, Worker, capacity, choose, uncached_tokens
from services.router.types import RouterRequest, SamplingSpec
from services.router.view import View

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Named:
    """A request with its blocks named under one kind of worker; made once, and again only when the kind changes."""

    request: RouterRequest
    kind: Kind
    root: bytes
    names: list[bytes]

    @property
    def prompt(self) -> Prompt:
        """What the policy looks at."""
        return Prompt(
            num_tokens=len(self.request.prompt_ids),
            block_size=self.kind.block_size,
            token_bytes=self.kind.token_bytes,
            num_layers=self.kind.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where one attempt goes."""

    prefill_id: str
    decode_id: str  # "" where one worker does all
    booking: Booking
    decision: Decision

    def explain(self) -> dict[str, Any]:
        """The decision for the timeline: choice, terms, and what else there was."""
        d = self.decision
        rows = [
            {"prefill": c.prefill_id, "decode": c.decode_id, "cost_ms": round(c.terms.cost_ms, 3), **_rounded(c.terms)}
            for c in d.candidates
        ]
        return {"policy": d.policy, "predicted_ms": round(d.choice.terms.cost_ms, 3), "considered": d.considered,
                "candidates": rows}  # fmt: skip


def check(request: RouterRequest, max_model_len: int) -> None:
    """Raise RequestError for a request that no worker could ever serve."""
    prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
    if not prompt:
        raise invalid("the prompt has no tokens", "prompt")
    if answer < 1:
        raise invalid(f"max_tokens must be at least 1, got {answer}", "max_tokens")
    if request.sampling.min_tokens > answer:
        raise invalid(f"min_tokens ({request.sampling.min_tokens}) is above max_tokens ({answer})", "min_tokens")
    if prompt + answer > max_model_len:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {prompt} tokens and the answer may have {answer}, together more than the model's "
            f"{max_model_len} (model.max_model_len)",
        )


def name_prompt(request: RouterRequest, kind: Kind) -> Named:
    """Costs about a microsecond per block."""
    root = kind.root(request.salt)
    return Named(request, kind, root, block_names(request.prompt_ids, kind.block_size, root))


def plan(named: Named, view: View, fabric: FabricMeter, policy: tuple[str, int], avoid: Collection[str]) -> Plan | None:
    """Choose workers, leaving out those in ``avoid``; None where that leaves none.

    Args:
        policy: name of the policy, and how many choices were made before.

    Raises:
        RequestError: NEVER_FITS where workers are there but none could ever hold the prompt.
    """
    prompt = named.prompt
    workers = view.candidates(named.names, avoid)
    decision = choose(policy[0], prompt, workers, fabric.now(), policy[1])
    if decision is None:
        most = capacity(view.candidates(named.names))
        if most and prompt.num_blocks > most:
            raise RequestError(
                ErrorCode.NEVER_FITS,
                f"the prompt needs {prompt.num_blocks} KV blocks of {prompt.block_size} tokens, workers have {most} "
                "(engine.num_blocks)",
            )
        return None
    chosen = decision.choice
    by_id = {w.worker_id: w for w in workers}
    return Plan(
        prefill_id=chosen.prefill_id,
        decode_id=chosen.decode_id,
        booking=_booking(named, by_id[chosen.prefill_id], by_id[chosen.decode_id or chosen.prefill_id]),
        decision=decision,
    )


def plan_reader(named: Named, view: View, prefill_id: str, avoid: Collection[str]) -> Booking | None:
    """The cheapest decode worker to take over a hand-off whose reader failed, as a booking; None: there is none.

    The KV is on ``prefill_id`` already, so only the readers differ.
    """
    readers = {w.worker_id: w for w in view.candidates(named.names, avoid) if w.role == "decode"}
    writer = Worker(worker_id=prefill_id, role="prefill", num_blocks=named.prompt.num_blocks)
    decision = choose("cost", named.prompt, [writer, *readers.values()], Fabric())
    if decision is None:
        return None
    return replace(_booking(named, writer, readers[decision.choice.decode_id]), prefill_tokens=0)


def to_proto(named: Named, identity: RouterIdentity, attempt: int, sampling: worker_pb2.Sampling) -> worker_pb2.Request:
    """The whole request as workers take it, but for `remaining_ms`, which is set when it is sent."""
    request = named.request
    return worker_pb2.Request(
        request_id=request.request_id,
        attempt=attempt,
        router_id=identity.router_id,
        router_epoch=identity.epoch,
        prompt_ids=request.prompt_ids,
        root_digest=named.root,
        block_names=b"".join(named.names),
        sampling=sampling,
        priority=request.priority,
        n=request.n,
    )


def sampling_proto(spec: SamplingSpec, seed: int, eos_token_ids: Collection[int]) -> worker_pb2.Sampling:
    """``seed``: the request's own, or the one drawn for it; its low 64 bits go out."""
    stops = set(spec.stop_token_ids) | (set() if spec.ignore_eos else set(eos_token_ids))
    shaping = spec.shaping
    penalties = (shaping.presence_penalty, shaping.frequency_penalty, shaping.repetition_penalty)
    grammar = shaping.grammar
    return worker_pb2.Sampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=max(0, min(spec.top_k, (1 << 31) - 1)),
        seed=seed & _U64,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        ignore_eos=spec.ignore_eos,
        stop_token_ids=sorted(stops),
        min_p=shaping.min_p,
        penalties=None
        if penalties == (0, 0, 1)
        else worker_pb2.Penalties(presence=penalties[0], frequency=penalties[1], repetition=penalties[2]),
        logit_bias=dict(shaping.logit_bias),
        logprobs=shaping.logprobs,
        prompt_logprobs=shaping.prompt_tops,
        grammar=None if grammar is None else worker_pb2.Grammar(kind=grammar.kind, text=grammar.text),
    )


def reader(view: View, worker_id: str) -> worker_pb2.Reader | None:
    """How a prefill worker reaches this decode worker; None where it is gone."""
    entry = view.entry(worker_id)
    if entry is None:
        return None
    return worker_pb2.Reader(worker_id=worker_id, epoch=entry.epoch, address=entry.registration.address)


def deadline_s(request: RouterRequest, budget: BudgetConfig) -> float:
    """Monotonic second at which the request's whole budget is spent: the client's own, at most budget.total_s."""
    own = budget.total_s if request.budget_s is None else request.budget_s
    return request.received_s + min(own, budget.total_s)


def _booking(named: Named, p: Worker, d: Worker) -> Booking:
    prompt, choices = named.prompt, named.request.n
    return Booking(
        prefill_id=p.worker_id,
        prefill_tokens=uncached_tokens(prompt, p.cached_blocks),
        decode_id=d.worker_id,
        decode_blocks=prompt.num_blocks + choices - min(d.cached_blocks, prompt.reusable_blocks),
        sequences=choices,
    )


def _rounded(terms: Any) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(terms).items()}
