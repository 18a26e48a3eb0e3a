"""What passes between the router's fronts (HTTP, gRPC) and its flow: one request in, a stream of token events out.

    front ── RouterRequest ──► Flow.stream ──► TokenEvent … TokenEvent(finish_reason) | RequestError
      └── timeline.mark(ACCEPT | TOKENIZED | FIRST_BYTE), timeline.close(outcome)

Text never crosses here: prompts come as ids, and stop strings are the front's (it closes the generator to stop).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from services.config import ServeConfig
from services.protocol.grammar import GrammarSpec
from services.router.admission.slo import NO_SLO, SLO

if TYPE_CHECKING:
    from services.protocol.model_card import ModelCard
    from services.router.record import Recorder

ACCEPT = "accept"
"""The body is read and parsed. Time zero is `received_s`, taken as early as the front can; between them lies the part
`accept` of TTFT."""
TOKENIZED = "tokenized"
"""Prompt ids exist; the request goes to the flow next."""
FIRST_BYTE = "first_byte"
"""The first token was handed to the client's socket: TTFT ends here."""
DONE = "done"
"""The last byte was handed over: E2E ends here. `Timeline.close` marks it."""


def new_request_id() -> str:
    """A unique id for one request inside pdray; the client's own id is only a label."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is done to the logits before a token is drawn, and what is told about them."""

    min_p: float = 0.0  # tokens less likely than this share of the likeliest one never come
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what its logit gains)
    logprobs: int | None = None  # how many of the likeliest tokens to tell with each output; None: no logprobs
    prompt_logprobs: int | None = None  # the same of the prompt
    echo_logprobs: int | None = None  # the same of a prompt that the answer begins with
    grammar: GrammarSpec | None = None
    grammar_field: str = ""  # that asked for it

    @property
    def prompt_tops(self) -> int | None:
        """How many of the likeliest tokens are wanted with each prompt token; None: nothing is."""
        return max((x for x in (self.prompt_logprobs, self.echo_logprobs) if x is not None), default=None)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found one token; natural logarithms."""

    token_id: int
    logprob: float
    rank: int  # 1 = no other token was likelier
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are drawn. `seed` None: the flow draws one and carries it through every attempt."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # <= 0 = off
    seed: int | None = None  # any int64 or uint64; sent as its low 64 bits
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's end tokens, which the flow adds from the model card."""
    shaping: Shaping = field(default_factory=Shaping)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRequest:
    """One accepted and tokenized request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    n: int = 1  # choices, each drawn by itself
    pools: bool = False  # no token is drawn: the one event has the mean of the prompt's last hidden states
    salt: str = ""  # cache_salt; equal prompts under different salts share no KV
    tenant: str = ""  # of the authenticated key; likewise
    label: str = ""  # the client's X-Request-Id, sanitised; need not be unique
    priority: int = 0  # lower first
    slo: SLO = NO_SLO
    received_s: float  # time.monotonic() when the request was accepted
    budget_s: float | None = None  # the client's own deadline counted from received_s; None: config.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Tokens of one choice that no earlier event held. Its last event has a finish_reason and may hold no token."""

    token_ids: tuple[int, ...]
    finish_reason: str = ""  # "" | stop | length
    cached_tokens: int = 0  # prompt tokens whose KV existed before this request
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the second prompt token on; in the first event only
    pooled: bytes = b""  # float32, little-endian


class TokenFlow(Protocol):
    """What a front needs of `Flow`; a scripted one stands in for it in the fronts' tests."""

    def stream(self, request: RouterRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one request as they come, until each of its choices has ended.

        Closing the generator (aclose, or cancelling the task that iterates it) aborts the request on its workers.

        Raises:
            RequestError: before the first event or after it; nothing follows.
        """
        ...

    def end_choice(self, request_id: str, choice: int) -> None:
        """One choice of a running request is not wanted any more; the others go on."""
        ...


class TimelineMarks(Protocol):
    """What a front does with a request's `Timeline`: get it by `core.timelines.open(request_id, label, received_s)`."""

    def mark(self, name: str, at_s: float | None = None) -> None:
        """A state was reached now, or at the monotonic second ``at_s``. Only the first mark of a name counts."""
        ...

    def close(self, outcome: str, at_s: float | None = None) -> None:
        """Mark DONE and move the timeline to the ring of finished ones. ``outcome``: ok, cancelled or an ErrorCode.

        Only the first call counts. Every opened timeline is closed, also that of a request the front refuses: this is
        where it enters the metrics.
        """
        ...


class TimelineStore(Protocol):
    """`core.timelines`."""

    def open(self, request_id: str, label: str = "", received_s: float | None = None) -> TimelineMarks:
        """The timeline of a request; a second call with the same id returns the same one."""
        ...


class Core(Protocol):
    """What the fronts see of `services.router.core.RouterCore`. All but `steps` return at once."""

    @property
    def config(self) -> ServeConfig: ...
    @property
    def card(self) -> ModelCard: ...
    @property
    def flow(self) -> TokenFlow: ...
    @property
    def timelines(self) -> TimelineStore: ...
    @property
    def recorder(self) -> Recorder: ...

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and if not, why (for /ready)."""
        ...

    def hidden_size(self) -> int:
        """Numbers in a pooled state of the served model. Raises RequestError where no worker gives any now, or ever."""
        ...

    def capacity_tokens(self) -> int:
        """Tokens of KV that one request can have on the workers of now; 0: not known."""
        ...

    def cluster(self) -> dict[str, Any]:
        """Body of /v1/cluster."""
        ...

    def request_debug(self, request_id: str) -> dict[str, Any] | None:
        """Body of /debug/requests/{id}; ``request_id`` may be the client's own label. None: unknown or forgotten."""
        ...

    async def steps(self, worker_id: str | None = None) -> dict[str, Any]:
        """Body of /debug/steps: the last engine steps of one worker, or of all. Raises RequestError NOT_FOUND."""
        ...

    def key_refused(self, reason: str) -> None:
        """A caller was turned away; ``reason``: one of `services.router.access.guard.REASONS`."""
        ...

    def metrics_text(self) -> bytes:
        """Body of /metrics, in the text format 0.0.4 (`prometheus_client.CONTENT_TYPE_LATEST`)."""
        ...
