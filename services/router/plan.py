"""From a client's request to what goes to a worker: checks, names, the choice, and the protobuf messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvstore.blocks import block_names, extend_name
from services.config import BudgetConfig
from services.protocol.errors import ErrorCode, RequestError, invalid
from services.protocol.proto import worker_pb2
from services.router.access.tenancy import block_salt
from services.router.bookings import Booking
from services.router.compat import Kind
from services.router.fabric import FabricMeter
from services.router.links import RouterIdentity
from services.router.policy import Candidate, Decision, Fabric, Prompt, Worker, capacity, choose, uncached_tokens
from services.router.policy_types import Draws
from services.router.types import RouterRequest, SamplingSpec
from services.router.view import View

_U64 = (1 << 64) - 1
Ask = tuple[str, int, Draws]
"""What the policy is asked with."""


@dataclass(frozen=True, slots=True)
class Named:
    """A request with its blocks named under one kind of worker; made once, and again only when the kind changes or
    tokens of it have to be computed again."""

    request: RouterRequest
    kind: Kind
    root: bytes
    names: list[bytes]  # of the full blocks of prompt and outputs
    outputs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by choice, from earlier attempts

    @property
    def num_choices(self) -> int:
        """Those that go on."""
        return len(self.outputs) or self.request.n

    @property
    def own(self) -> tuple[int, ...]:
        """Outputs that are computed with the prompt; of several choices each computes its own later."""
        return next(iter(self.outputs.values())) if len(self.outputs) == 1 else ()

    @property
    def num_tokens(self) -> int:
        """Whose KV is handed over: of the prompt, and of the outputs where one choice goes on."""
        return len(self.request.prompt_ids) + len(self.own)

    @property
    def prompt_names(self) -> bytes:
        """Names of the prompt's own full blocks, one after the other."""
        return b"".join(self.names[: len(self.request.prompt_ids) // self.kind.block_size])

    @property
    def prompt(self) -> Prompt:
        """What the policy looks at."""
        return Prompt(
            num_tokens=self.num_tokens,
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
            {
                "prefill": c.prefill_id,
                "decode": c.decode_id,
                "cost_ms": round(c.terms.cost_ms, 3),
                **_rounded(c.terms),
                **({"holder": c.holder_id, "held_blocks": c.held_blocks} if c.holder_id else {}),
            }
            for c in d.candidates
        ]
        return {"policy": d.policy, "predicted_ms": round(d.choice.terms.time_ms, 3), "considered": d.considered,
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
    answer = 0 if request.pools else answer
    if prompt + answer > max_model_len:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {prompt} tokens and the answer may have {answer}, together more than the model's "
            f"{max_model_len} (model.max_model_len)",
        )


def name_prompt(request: RouterRequest, kind: Kind, outputs: Mapping[int, tuple[int, ...]] | None = None) -> Named:
    """Costs about a microsecond per block. ``outputs``: of choices that go on, where some tokens have come already."""
    named = Named(request, kind, kind.root(block_salt(request.tenant, request.salt)), [], outputs or {})
    if request.pools:
        return named  # it neither uses nor leaves cached blocks
    return replace(named, names=block_names((*request.prompt_ids, *named.own), kind.block_size, named.root))


def names_after(named: Named, token_ids: Sequence[int]) -> list[bytes]:
    """Names of the blocks that are full after the answer ``token_ids``; of its last token no KV exists."""
    names, size = list(named.names), named.kind.block_size
    tokens = (*named.request.prompt_ids, *token_ids)
    for start in range(len(names) * size, len(tokens) - size, size):
        names.append(extend_name(names[-1] if names else named.root, tokens[start : start + size]))
    return names


def plan(named: Named, view: View, fabric: FabricMeter, policy: Ask, avoid: Collection[str]) -> Plan | None:
    """Choose workers, leaving out those in ``avoid``; None where that leaves none.

    Args:
        policy: its name, how many choices were made before, and what it may draw from.

    Raises:
        RequestError: NEVER_FITS where workers are there but none could ever hold the prompt.
    """
    if named.request.pools:
        return _plan_pooled(named, view, fabric, avoid)
    prompt = named.prompt
    workers = view.candidates(named.names, avoid)
    decision = choose(policy[0], prompt, workers, fabric.now(), policy[1], policy[2])
    if decision is None:
        _check_fits(prompt, capacity(view.candidates(named.names)))
        return None
    chosen = decision.choice
    by_id = {w.worker_id: w for w in workers}
    return Plan(
        prefill_id=chosen.prefill_id,
        decode_id=chosen.decode_id,
        booking=_booking(
            named, _after_pull(by_id[chosen.prefill_id], chosen), by_id[chosen.decode_id or chosen.prefill_id]
        ),
        decision=decision,
    )


def ask(policy: str, turn: int, draw: Callable[[], float] = random.random) -> Ask:
    """``draw``: any source of uniform numbers in [0, 1)."""
    return policy, turn, (draw(), draw(), draw(), draw())


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


def plan_here(named: Named, view: View, fabric: FabricMeter, avoid: Collection[str]) -> Plan | None:
    """One worker that computes everything itself: a mixed one, else a decode worker; None: there is none.

    Those in ``avoid`` come last: they may have failed as a half of a pair only.
    """
    workers = [w for w in view.candidates(named.names) if w.role != "prefill"]
    groups = [[w for w in workers if w.role == role and (w.worker_id in avoid) is avoided]
              for role in ("mixed", "decode") for avoided in (False, True)]  # fmt: skip
    for group in groups:
        if found := _alone(named, group, fabric):
            return found
    return None


def unserved(request: RouterRequest, view: View) -> RequestError | None:
    """Why nobody could take the request now; None where somebody could."""
    return view.no_pooler() if request.pools else view.no_pair()


def _plan_pooled(named: Named, view: View, fabric: FabricMeter, avoid: Collection[str]) -> Plan | None:
    """One worker that computes prompts, prefill or mixed. Raises as `plan`."""
    there = {e.worker_id for e in view.poolers()}
    workers = [w for w in view.candidates((), avoid) if w.worker_id in there]
    found = _alone(named, workers, fabric)
    if found is None:
        _check_fits(named.prompt, max((w.num_blocks for w in view.candidates(()) if w.worker_id in there), default=0))
    return found


def _alone(named: Named, workers: Sequence[Worker], fabric: FabricMeter) -> Plan | None:
    """The best of these, which does everything by itself."""
    alone = {w.worker_id: replace(w, role="mixed") for w in workers}
    decision = choose("cost", named.prompt, list(alone.values()), fabric.now())
    if decision is None:
        return None
    w = alone[decision.choice.prefill_id]
    return Plan(prefill_id=w.worker_id, decode_id="", booking=_booking(named, w, w), decision=decision)


def _check_fits(prompt: Prompt, most: int) -> None:
    """Raises RequestError NEVER_FITS where workers are there, with ``most`` blocks, and none could hold the prompt."""
    if most and prompt.num_blocks > most:
        raise RequestError(
            ErrorCode.NEVER_FITS,
            f"the prompt needs {prompt.num_blocks} KV blocks of {prompt.block_size} tokens, workers have {most} "
            "(engine.num_blocks)",
        )


def to_proto(named: Named, identity: RouterIdentity, attempt: int, sampling: worker_pb2.Sampling) -> worker_pb2.Request:
    """The whole request as workers take it, but for `remaining_ms`, which is set when it is sent."""
    request, outputs = named.request, named.outputs
    several = [worker_pb2.ChoiceOutputs(choice=i, token_ids=ids) for i, ids in outputs.items()] if request.n > 1 else ()
    return worker_pb2.Request(
        request_id=request.request_id,
        attempt=attempt,
        router_id=identity.router_id,
        router_epoch=identity.epoch,
        prompt_ids=request.prompt_ids,
        output_ids=outputs.get(0, ()) if request.n == 1 else (),
        outputs=several,
        root_digest=named.root,
        block_names=named.prompt_names,
        sampling=sampling,
        priority=request.priority,
        n=request.n,
        pools=request.pools,
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


def source(view: View, choice: Candidate) -> worker_pb2.Source | None:
    """Where the prefill worker loads KV from; None where nothing is to be loaded, or the holder is gone."""
    entry = view.entry(choice.holder_id) if choice.holder_id else None
    if entry is None:
        return None
    return worker_pb2.Source(
        worker_id=choice.holder_id,
        epoch=entry.epoch,
        address=entry.registration.address,
        blocks=choice.held_blocks,
    )


def deadline_s(request: RouterRequest, budget: BudgetConfig) -> float:
    """Monotonic second at which the request's whole budget is spent: the client's own, at most budget.total_s."""
    own = budget.total_s if request.budget_s is None else request.budget_s
    return request.received_s + min(own, budget.total_s)


def _after_pull(p: Worker, choice: Candidate) -> Worker:
    return replace(p, cached_blocks=max(p.cached_blocks, choice.held_blocks))


def _booking(named: Named, p: Worker, d: Worker) -> Booking:
    prompt, choices = named.prompt, named.num_choices
    return Booking(
        prefill_id=p.worker_id,
        prefill_tokens=uncached_tokens(prompt, p.cached_blocks),
        decode_id=d.worker_id,
        decode_blocks=prompt.num_blocks + choices - min(d.cached_blocks, prompt.reusable_blocks),
        sequences=choices,
        prompt_tokens=prompt.num_tokens,
    )


def _rounded(terms: Any) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(terms).items()}
