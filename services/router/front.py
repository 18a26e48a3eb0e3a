"""What HTTP and gRPC share: from a checked request to answers, with its text tokenized and its timeline opened."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.protocol.errors import RequestError, invalid
from services.router.access.caller import ANONYMOUS, Caller
from services.router.access.caps import check_limits
from services.router.access.guard import Guard
from services.router.admission.slo import read_slo
from services.router.answers import Answer, AnswerText
from services.router.running import Running
from services.router.structured import with_field
from services.router.text import Text, context_tokens
from services.router.types import ACCEPT, TOKENIZED, Core, RouterRequest, TimelineMarks, new_request_id
from services.router.validate import Ask, require_model

MAX_LABEL_CHARS = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/=+@\-]")


def label_of(text: str) -> str:
    """A client's request id as it may stand in headers and logs: a label, never a key."""
    return _NOT_IN_LABEL.sub("", text[: 4 * MAX_LABEL_CHARS])[:MAX_LABEL_CHARS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it reached the front, before its body was read."""

    received_s: float = field(default_factory=time.monotonic)
    request_id: str = field(default_factory=new_request_id)
    label: str = ""
    budget_s: float | None = None  # the client's own deadline
    slo: Mapping[str, str] = field(default_factory=dict)  # targets among its headers, as they came
    caller: Caller = ANONYMOUS


class Front:
    """One for all fronts of a router. Owns the text lanes: `close` it last."""

    def __init__(self, core: Core) -> None:
        """Raises ConfigError where the prepared model's tokenizer or template, or the file of API keys, is unusable."""
        self.core = core
        self.guard = Guard(core.config.access, on_refusal=core.key_refused)
        self.running = Running()
        self.model = core.config.model.served_name or core.card.name
        context = context_tokens(core.card, core.config.model.max_model_len)
        self.text = Text(
            core.card,
            context=context,
            max_pending=core.config.router.max_queue,
            tool_parser=core.config.model.tool_parser,
            limit_s=core.config.limits.text_s,
        )

    def close(self) -> None:
        self.text.close()

    def check_limits(self, body: Mapping[str, Any]) -> None:
        """Refuse a request that holds more than config.limits allow; before anything else looks at its fields."""
        check_limits(body, self.core.config.limits)

    def check_model(self, name: str) -> None:
        """Refuse another model's name; none means the only one. Raises RequestError MODEL_NOT_FOUND."""
        require_model(name or None, self.model)

    def open(self, arrival: Arrival) -> TimelineMarks:
        """The request's timeline. The caller closes it, or hands it to `answers`, whose answers close it."""
        return self.core.timelines.open(arrival.request_id, arrival.label, arrival.received_s)

    async def answers(self, ask: Ask, arrival: Arrival, timeline: TimelineMarks) -> list[Answer]:
        """One answer for each prompt, none started yet. The first one takes over ``timeline``.

        Raises:
            RequestError: a prompt that cannot be tokenized or does not fit, or too many choices; the caller keeps
                ``timeline``.
        """
        if ask.n > self.core.config.router.max_n:
            raise invalid(f"n is {ask.n}, at most {self.core.config.router.max_n} are allowed (router.max_n)", "n")
        timeline.mark(ACCEPT)
        if ask.shaping.grammar is not None:
            try:
                await self.text.check_grammar(ask.shaping.grammar)
            except RequestError as exc:
                raise with_field(exc, ask.shaping.grammar_field) from None
        requests = await self._requests(ask, arrival)
        echoed = [await self.text.decode(r.prompt_ids) if ask.echo else "" for r in requests]
        timeline.mark(TOKENIZED)
        arrival.caller.take_prompt(sum(len(request.prompt_ids) for request in requests), time.monotonic())
        flow = self.running.flow(self.core.flow, arrival.caller)
        answers = []
        for index, request in enumerate(requests):
            marks = timeline if index == 0 else self._open_another(request)
            texts = [self._answer_text(ask) for _ in range(ask.n)]
            answer = Answer(index, flow, request, texts, marks)
            answer.echoed = echoed[index]
            answer.with_token_ids = ask.extras.return_token_ids
            if ask.shaping.echo_logprobs is not None:
                answer.echoed_chars = await self.text.lengths(request.prompt_ids)
            answers.append(answer)
        return answers

    async def _requests(self, ask: Ask, arrival: Arrival) -> list[RouterRequest]:
        prompts = [await self._encode(prompt, i, ask) for i, prompt in enumerate(ask.prompts)]
        if ask.messages:
            prompts = [await self.text.encode_chat(ask.messages, ask.chat_options)]
        slo = read_slo(arrival.slo, ask.slo, self.core.config.slo)
        return [
            RouterRequest(
                request_id=arrival.request_id if index == 0 else new_request_id(),
                prompt_ids=prompt_ids,
                n=ask.n,
                sampling=ask.sampling(len(prompt_ids), self.text.context, self.core.capacity_tokens()),
                salt=ask.salt,
                tenant=arrival.caller.tenant,
                label=arrival.label,
                priority=ask.priority,
                slo=slo,
                received_s=arrival.received_s,
                budget_s=arrival.budget_s,
            )
            for index, prompt_ids in enumerate(prompts)
        ]

    async def _encode(self, prompt: str | tuple[int, ...], index: int, ask: Ask) -> tuple[int, ...]:
        if isinstance(prompt, str):
            where = "prompt" if len(ask.prompts) == 1 else f"prompt[{index}]"
            return await self.text.encode_prompt(prompt, where, bare=ask.extras.is_bare)
        return prompt

    def _open_another(self, request: RouterRequest) -> TimelineMarks:
        marks = self.core.timelines.open(request.request_id, request.label, request.received_s)
        marks.mark(ACCEPT)
        marks.mark(TOKENIZED)
        return marks

    def _answer_text(self, ask: Ask) -> AnswerText:
        end_ids = frozenset(ask.stop_token_ids) | frozenset(() if ask.ignore_eos else self.core.card.eos_token_ids)
        calls = self.text.call_reading(ask.tools) if ask.tools.offered else None
        stop_ids = frozenset(ask.stop_token_ids)
        return AnswerText(self.text.detokenizer(), ask.stops, ask.min_tokens, end_ids, stop_ids, calls)


def outcome_of(error: BaseException) -> str:
    """What a timeline is closed with when a request ends before it has an answer."""
    return str(error.code) if isinstance(error, RequestError) else "cancelled"
