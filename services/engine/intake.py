"""What the engine refuses at once, before a sequence takes a place in its queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

from kvstore.blocks import NAME_BYTES
from services.engine.messages import AddSequence, Sampling
from services.protocol.errors import ErrorCode, RequestError, invalid


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can hold, and what its model knows."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_tokens(self, num_prompt_tokens: int, num_given_tokens: int, max_tokens: int) -> int:
        """Tokens whose KV a request may come to hold; the last token that it generates is never computed."""
        return max(num_given_tokens, min(num_prompt_tokens + max_tokens, self.max_model_len) - 1)

    def ends(self, token_id: int, sampling: Sampling) -> bool:
        """Whether the token is one of `end_tokens`, without making the set."""
        if token_id in sampling.stop_token_ids:
            return True
        return token_id in self.eos_token_ids and not (sampling.ignore_eos and sampling.grammar is None)

    def end_tokens(self, sampling: Sampling) -> frozenset[int]:
        eos = () if sampling.ignore_eos and sampling.grammar is None else self.eos_token_ids
        return frozenset((*eos, *sampling.stop_token_ids))


def check_sequence(message: AddSequence, limits: Limits) -> None:
    """Raise RequestError unless the sequence can be computed here, given time.

    A hand-off needs room for what it brings along, any other sequence for all that it may generate too.
    """
    outputs = [ids for _, ids in message.outputs] or [message.output_ids]
    longest = max(outputs, key=len)
    num_given = len(message.prompt_ids) + len(longest)
    if not message.prompt_ids:
        raise invalid("the prompt holds no token", "prompt")
    wrong = next((t for t in chain(message.prompt_ids, *outputs) if not 0 <= t < limits.vocab_size), None)
    if wrong is not None:
        raise invalid(f"token id {wrong} is outside the vocabulary of {limits.vocab_size}", "prompt")
    _check_sampling(message.sampling, limits)
    _check_shaping(message.sampling, limits)
    if message.pools:
        _check_pooling(message)
    if num_given >= limits.max_model_len + message.pools:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_given} tokens leave no room for an answer within {limits.max_model_len} (model.max_model_len)",
            param="prompt",
        )
    _check_choices(message)
    if len(longest) >= message.sampling.max_tokens:
        raise invalid(
            f"{len(longest)} output tokens came along, max_tokens is {message.sampling.max_tokens}", "max_tokens"
        )
    if len(message.block_names) > len(message.prompt_ids) // limits.block_size:
        raise invalid(f"{len(message.block_names)} block names for {len(message.prompt_ids)} prompt tokens")
    if any(len(name) != NAME_BYTES for name in (*message.block_names, message.root) if name):
        raise invalid(f"a block name does not have {NAME_BYTES} bytes")
    if message.block_names and (not message.root or not all(message.block_names)):
        raise invalid("block names need a root, and none may be empty")
    num_tokens = len(message.prompt_ids) if len(outputs) > 1 else num_given
    if not (message.hand_off or message.pools):
        num_tokens = limits.most_tokens(len(message.prompt_ids), num_given, message.sampling.max_tokens)
    if limits.blocks(num_tokens) > limits.num_blocks:
        raise RequestError(
            ErrorCode.NEVER_FITS,
            f"the request may need {num_tokens} tokens of KV, {limits.blocks(num_tokens)} blocks; the worker has "
            f"{limits.num_blocks} blocks, {limits.num_blocks * limits.block_size} tokens (engine.num_blocks)",
        )


def _check_pooling(message: AddSequence) -> None:
    """Nothing is drawn, so nothing may be asked of it."""
    sampling = message.sampling
    asks = message.output_ids or message.outputs or sampling.grammar or sampling.prompt_logprobs >= 0
    if asks or message.n > 1 or message.hand_off:
        raise invalid("a prompt whose hidden states are pooled is neither continued nor handed off")


def _check_choices(message: AddSequence) -> None:
    """How many there are, and whose outputs came along."""
    if message.n < 1:
        raise invalid(f"n must be at least 1, got {message.n}", "n")
    if message.n > 1 and message.output_ids:
        raise invalid(f"{len(message.output_ids)} output tokens came along for {message.n} choices", "n")
    choices = {choice for choice, _ in message.outputs}
    if message.output_ids and choices:
        raise invalid("output tokens came along twice", "n")
    if len(choices) < len(message.outputs) or not all(0 <= choice < message.n for choice in choices):
        raise invalid(f"outputs of choices {[c for c, _ in message.outputs]} came along, there are {message.n}", "n")


def _check_shaping(sampling: Sampling, limits: Limits) -> None:
    """What is done to the logits; penalties and min_p that are no sensible numbers could make every logit NaN."""
    wrong = next(
        (t for t, value in sampling.logit_bias if not 0 <= t < limits.vocab_size or not math.isfinite(value)), None
    )
    if wrong is not None:
        raise invalid(f"logit_bias of token id {wrong} is no number, or past the {limits.vocab_size} ids", "logit_bias")
    if not 0 <= sampling.min_p <= 1:
        raise invalid(f"min_p must be from 0 to 1, got {sampling.min_p}", "min_p")
    penalties = sampling.penalties
    if penalties is None:
        return
    if not 0 < penalties.repetition <= 2:
        raise invalid(
            f"repetition_penalty must be above 0 and at most 2, got {penalties.repetition}", "repetition_penalty"
        )
    if not (math.isfinite(penalties.presence) and math.isfinite(penalties.frequency)):
        raise invalid("presence_penalty and frequency_penalty must be finite numbers", "presence_penalty")


def _check_sampling(sampling: Sampling, limits: Limits) -> None:
    if sampling.max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {sampling.max_tokens}", "max_tokens")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise invalid(f"temperature must be a number of at least 0, got {sampling.temperature}", "temperature")
    if not 0 < sampling.top_p <= 1:
        raise invalid(f"top_p must be above 0 and at most 1, got {sampling.top_p}", "top_p")
    wrong = next((t for t in sampling.stop_token_ids if not 0 <= t < limits.vocab_size), None)
    if wrong is not None:
        raise invalid(f"stop token id {wrong} is outside the vocabulary of {limits.vocab_size}", "stop_token_ids")
