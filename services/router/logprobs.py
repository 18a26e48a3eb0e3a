"""Logprobs in the shapes of the OpenAI API.

A token is shown as its text, or as ``bytes:\\xe2\\x80`` where its bytes are no whole character; ``bytes`` in a chat are
always exact, so that those of all tokens, joined, are the answer's text. Special tokens show their name and have no
bytes. End tokens are not told: they are no part of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from services.router.detokenize import Detokenizers
from services.router.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Told:
    """One token of an answer, or of the prompt before it."""

    token_id: int
    offset: int  # characters of text before it, from the start of the answer's own text; negative in the prompt
    logprobs: TokenLogprobs | None  # None: nothing stands before it


class TokenNames:
    """How tokens are shown."""

    def __init__(self, detokenizers: Detokenizers) -> None:
        self._detokenizers = detokenizers

    def name(self, token_id: int) -> str:
        data = self._detokenizers.token_bytes(token_id)
        if not data:
            return self._detokenizers.token_name(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, told: Iterable[Told]) -> ChoiceLogprobs:
        """For a choice of a chat, whole or in part."""
        content = [self._chat_token(x.logprobs) for x in told if x.logprobs is not None]
        return ChoiceLogprobs(content=content, refusal=None)

    def completion(self, told: Sequence[Told], start: int) -> Logprobs:
        """For a choice of a completion. ``start``: characters of its text before the answer's own."""
        return Logprobs.model_construct(
            tokens=[self.name(x.token_id) for x in told],
            token_logprobs=[None if x.logprobs is None else x.logprobs.logprob for x in told],
            top_logprobs=[None if x.logprobs is None else self._by_name(x.logprobs) for x in told],
            text_offset=[start + x.offset for x in told],
        )

    def prompt(self, told: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's ``prompt_logprobs``: for each token of the prompt the likeliest ones and itself, by id."""
        return [None, *(self._by_id(x) for x in told)]

    def _chat_token(self, x: TokenLogprobs) -> ChatCompletionTokenLogprob:
        return ChatCompletionTokenLogprob(
            token=self.name(x.token_id),
            logprob=x.logprob,
            bytes=list(self._detokenizers.token_bytes(x.token_id)),
            top_logprobs=[
                TopLogprob(token=self.name(i), logprob=p, bytes=list(self._detokenizers.token_bytes(i)))
                for i, p in x.top
            ],
        )

    def _by_name(self, x: TokenLogprobs) -> dict[str, float]:
        return {self.name(x.token_id): x.logprob} | {self.name(i): p for i, p in x.top}

    def _by_id(self, x: TokenLogprobs) -> dict[str, Any]:
        found = {i: (p, rank) for rank, (i, p) in enumerate(x.top, 1)} | {x.token_id: (x.logprob, x.rank)}
        return {str(i): {"logprob": p, "rank": rank, "decoded_token": self.name(i)} for i, (p, rank) in found.items()}
