"""Whether a path computes what it should, on a short text in two chunks over shuffled blocks."""

from __future__ import annotations

import torch

from kvstore.errors import ConfigError
from services.engine import attention
from services.engine.attention import UnsupportedAttention
from services.engine.batch import PagedMemory, Span
from services.engine.computation import ModelPath
from services.engine.generic import GenericPath
from services.engine.native.fused import NotFused
from services.protocol.model_card import ModelCard

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the norm of the logits."""
_NUM_TOKENS = 24
_TABLE = (5, 2, 7, 0, 3, 6)


def check_paged(card: ModelCard, path: GenericPath) -> None:
    """Compare with transformers' eager attention.

    Raises:
        ConfigError: other numbers, or attention that the backends do not compute; says what.
    """
    module, ids = path.module, _text(card)
    dtype, device = next(module.parameters()).dtype, next(module.parameters()).device
    seen: list[int] = []
    try:
        logits = _last_logits(card, path, dtype, device, seen)
    except UnsupportedAttention as exc:
        raise ConfigError(f"model.path: {card.name} ({card.architecture}) cannot be served: {exc}") from None
    if seen != [*range(card.num_layers)] * 2:
        raise ConfigError(
            f"model.path: {card.name} computes attention in layers {seen}, not once in each of its layers"
        )
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = module(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1).logits[0]
    finally:
        module.set_attn_implementation(attention.NAME)
    error = difference(logits, expected)
    if not error < TOLERANCE[dtype]:
        raise ConfigError(
            f"model.path: {card.name} ({card.architecture}) computes something else over paged memory: "
            f"logits differ by {error:.2g} of their norm"
        )


def check_equal(card: ModelCard, generic: GenericPath, fast: ModelPath) -> None:
    """Compare a faster path with the generic one.

    Raises:
        NotFused: other numbers.
    """
    parameter = next(generic.module.parameters())
    expected = _last_logits(card, generic, parameter.dtype, parameter.device, [])
    error = difference(_last_logits(card, fast, parameter.dtype, parameter.device, []), expected)
    if not error < TOLERANCE[parameter.dtype]:
        raise NotFused(f"its logits differ from the generic path's by {error:.2g} of their norm")


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference in parts of the expected norm; NaN where either is not finite."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def _text(card: ModelCard) -> list[int]:
    return [(7 * i + 3) % card.vocab_size for i in range(_NUM_TOKENS)]


def _last_logits(
    card: ModelCard, path: ModelPath, dtype: torch.dtype, device: torch.device, seen: list[int]
) -> torch.Tensor:
    shape = (max(_TABLE) + 1, 2, card.num_kv_heads, 4, card.head_dim)
    memory = PagedMemory.over([torch.zeros(shape, dtype=dtype, device=device) for _ in range(card.num_layers)])
    ids, cut = _text(card), _NUM_TOKENS // 2 + 1
    done = None
    for start, stop in ((0, cut), (cut, _NUM_TOKENS)):
        done = path.forward(memory, [Span(ids[start:stop], start, _TABLE)], [(0, stop - start - 1)], seen.append)
    assert done is not None
    return done.logits
