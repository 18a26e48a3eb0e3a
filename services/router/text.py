"""Text in the router: prompts and chats to token ids, and back. No torch, no transformers.

Tokenizing runs off the event loop, in two lanes, so that a prompt of megabytes delays neither the loop nor short
prompts. What cannot fit the context is refused by its size, before it is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from kvstore.errors import ConfigError
from services.protocol.errors import ErrorCode, RequestError, invalid
from services.protocol.grammar import GrammarSpec, check
from services.protocol.model_card import ModelCard
from services.router.detokenize import Detokenizer, Detokenizers
from services.router.logprobs import TokenNames
from services.router.template import DEFAULT_OPTIONS, ChatOptions, ChatTemplate, Message, no_template
from services.router.tools.parsers import HERMES, MARKERS, CallReading, make_parser
from services.router.tools.prompt import AUTO
from services.router.tools.spec import Tools

DEFAULT_CONTEXT_TOKENS = 8192
"""Cap where config.model.max_model_len is 0."""
LONG_TEXT_CHARS = 32 << 10
"""Longer texts use the lane for long ones."""
SLICE_CHARS = 64 << 10
"""Longer texts are tokenized in slices first, to find out whether they fit."""
SHORT_LANE_THREADS = 2
BUSY_RETRY_S = 1.0

T = TypeVar("T")


def _rendered(template: ChatTemplate, messages: Sequence[Message], options: ChatOptions) -> str:
    return template.render(
        messages,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        variables=options.variables,
    )


def context_tokens(card: ModelCard, max_model_len: int) -> int:
    """Tokens of prompt and answer together; ``max_model_len`` as in config.model, 0 for the model's own limit."""
    return min(card.max_model_len, max_model_len or DEFAULT_CONTEXT_TOKENS)


def too_long(prompt_tokens: int, context: int, *, at_least: bool = False, param: str | None = None) -> RequestError:
    """The refusal of a prompt that fills the context alone."""
    count = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    return RequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"The prompt has {count} tokens; the context of this model is {context} tokens, prompt and answer together.",
        param=param,
    )


class Text:
    """The tokenizer and chat template of one model. One object serves all requests; `close` it after the last."""

    def __init__(
        self, card: ModelCard, *, context: int, max_pending: int = 1024, tool_parser: str = AUTO, limit_s: float = 10.0
    ) -> None:
        """``context``: see `context_tokens`. ``max_pending``: texts in the lanes at once; one more is refused (503).
        ``tool_parser``: as in config.model. ``limit_s``: how long one text may take in a lane.

        Raises:
            ConfigError: the tokenizer or the template of the prepared model is unusable.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
        except Exception as exc:  # the tokenizers package raises bare Exception
            raise ConfigError(f"model.path: {card.tokenizer_path} is unreadable: {exc}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.context = context
        self.vocab_size = card.vocab_size
        self._bos = (card.bos_token_id,) if card.add_bos and card.bos_token_id is not None else ()
        self._template = (
            ChatTemplate(card.chat_template, card.special_tokens, tool_parser=tool_parser)
            if card.chat_template
            else None
        )
        self._call_format = HERMES if self._template is None else self._template.call_format
        self._detokenizers = Detokenizers(self._tokenizer)
        self._marks = self._special_marks(MARKERS[self._call_format])
        self.names = TokenNames(self._detokenizers)
        self._longest_token_bytes = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        self._max_pending = max_pending
        self._limit_s = limit_s
        self._pending = 0
        self._short = ThreadPoolExecutor(SHORT_LANE_THREADS, thread_name_prefix="pdray-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="pdray-long-text")

    def close(self) -> None:
        """End the lanes; texts that wait in them are dropped."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def encode_prompt(self, text: str, param: str = "prompt", *, bare: bool = False) -> tuple[int, ...]:
        """Ids of a plain prompt, with the start token in front where the model wants one and it is not ``bare``.

        Raises:
            RequestError: the text is too long, or gives no token at all.
        """
        self._check_size(len(text), param)
        ids = (() if bare else self._bos) + await self._in_lane(len(text), lambda: self._encode(text, param))
        if not ids:
            raise invalid("the prompt is empty, and this model has no start token to begin with", param)
        return ids

    async def encode_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS) -> tuple[int, ...]:
        """Ids of a chat up to where the assistant is to answer. Start tokens are the template's business.

        Raises:
            RequestError: no template, messages it refuses, or too long a text.
        """
        template = self._template
        if template is None:
            raise no_template()
        chars = sum(len(str(message.get("content") or "")) for message in messages) + options.chars
        self._check_size(chars, "messages")
        ids = await self._in_lane(chars, lambda: self._encode(_rendered(template, messages, options), "messages"))
        if not ids:
            raise invalid("the chat gives an empty prompt", "messages")
        return ids

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""
        return self._detokenizers.token_name(token_id)

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of ids at once, special tokens left out."""
        return await self._in_lane(len(ids), lambda: self._detokenizers.decode(ids))

    async def check_grammar(self, spec: GrammarSpec) -> None:
        """Raise RequestError unless the specification can be followed; see `services.protocol.grammar.check`."""
        await self._in_lane(len(spec.text), lambda: check(spec))

    async def lengths(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Characters that each id adds to the text of all, as they become whole."""
        push = self.detokenizer().push
        return await self._in_lane(len(ids), lambda: tuple(len(push(token_id)) for token_id in ids))

    def call_reading(self, tools: Tools) -> CallReading:
        """State for the calls of one answer."""
        return CallReading(make_parser(tools, self._call_format), self._marks)

    def _special_marks(self, names: Sequence[str]) -> dict[int, str]:
        ids = {name: self._tokenizer.token_to_id(name) for name in names if name}
        return {i: name for name, i in ids.items() if i is not None and not self._detokenizers.token_bytes(i)}

    def detokenizer(self) -> Detokenizer:
        """State for one answer."""
        return self._detokenizers.make()

    def _encode(self, text: str, param: str) -> tuple[int, ...]:
        try:
            self._check_slices(text, param)
            return tuple(self._encoding(text).ids)
        except UnicodeEncodeError:
            raise invalid("the text holds a lone surrogate, which is not valid text", param) from None

    def _encoding(self, text: str) -> Encoding:
        # encode_batch lets go of the interpreter while it works; encode does not
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _check_slices(self, text: str, param: str) -> None:
        """Refuse a long text as soon as its slices have twice the tokens that fit: the work is bounded by the context,
        not by the body. Cutting adds a few tokens at each border, far fewer than a factor of two takes.
        """
        count = 0
        for start in range(0, len(text), SLICE_CHARS) if len(text) > SLICE_CHARS else ():
            count += len(self._encoding(text[start : start + SLICE_CHARS]))
            if count > 2 * self.context:
                raise too_long(self.context + 1, self.context, at_least=True, param=param)

    def _check_size(self, chars: int, param: str) -> None:
        least = -(-chars // self._longest_token_bytes)
        if least > self.context:
            raise too_long(least, self.context, at_least=True, param=param)

    async def _in_lane(self, chars: int, work: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{self._pending} prompts wait to be tokenized (setting router.max_queue)",
                retry_after_s=BUSY_RETRY_S,
            )
        lane = self._long if chars > LONG_TEXT_CHARS else self._short
        self._pending += 1
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.get_running_loop().run_in_executor(lane, work)
        except TimeoutError:
            message = f"a text was not rendered or tokenized within {self._limit_s:g} s (limits.text_s)"
            raise RequestError(ErrorCode.OVERLOADED, message, retry_after_s=BUSY_RETRY_S) from None
        finally:
            self._pending -= 1
