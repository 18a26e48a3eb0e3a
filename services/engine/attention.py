"""Attention over paged KV memory, for every model whose attention goes through transformers' AttentionInterface.

Life of a layer, for all sequences of a step packed as one row of tokens:

    model ─► attend ─► backend.write(K, V by slot) ─► on_layer ─► backend.read(by block table) ─► output

The model's classes are transformers' own; they call `attend` by the name ``pdray`` and hand it the packed batch through
the keyword ``kv_batch``. What an architecture wants beyond this (sinks, soft caps, biases) is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from services.engine.batch import DecodeGroup, PackedBatch, PrefillSpan
from services.protocol.model_card import ModelCard

if TYPE_CHECKING:
    from services.engine.native.library import Kernels

NAME = "pdray"
"""What the attention implementation is registered as."""

_HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


class UnsupportedAttention(ValueError):
    """The model wants something of attention that the backends do not compute; says what."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What one layer hands over; T tokens of all sequences of the step."""

    query: torch.Tensor  # [T, heads, head_dim]
    key: torch.Tensor  # [T, kv_heads, head_dim]
    value: torch.Tensor  # [T, kv_heads, head_dim]
    scaling: float
    window: int  # a token sees itself and window - 1 before it; 0: all before it


class AttentionBackend(Protocol):
    """Writes and reads one layer of the paged memory. Holds no state between calls."""

    name: str
    gathers: bool
    """It reads through the batch's row indices and scratch; else those are not made."""

    def write(self, batch: PackedBatch, layer: int, heads: Heads) -> None:
        """Put K and V where the batch's slots say."""

    def read(self, batch: PackedBatch, layer: int, heads: Heads) -> torch.Tensor:
        """Attention of each token over its own sequence: [T, heads, head_dim]."""


class ReferenceBackend:
    """Gathers each sequence's blocks once per layer and calls torch's scaled dot product attention: the oracle.

    Decodes of similar length run as one call, padded; each prefill chunk is a call of its own.
    """

    name = "reference"
    gathers = True

    def write(self, batch: PackedBatch, layer: int, heads: Heads) -> None:
        rows = batch.memory.token_rows[layer]
        rows.index_copy_(0, batch.key_rows, heads.key.reshape(-1, rows.shape[1]))
        rows.index_copy_(0, batch.value_rows, heads.value.reshape(-1, rows.shape[1]))

    def read(self, batch: PackedBatch, layer: int, heads: Heads) -> torch.Tensor:
        parts = [self._decode(batch, layer, heads, group) for group in batch.decodes]
        parts += [self._prefill(batch, layer, heads, span) for span in batch.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, batch: PackedBatch, layer: int, heads: Heads, group: DecodeGroup) -> torch.Tensor:
        kv_heads, head_dim = heads.key.shape[1:]
        num = group.stop - group.start
        torch.index_select(batch.memory.block_rows[layer], 0, group.read_rows, out=group.scratch)
        keys, values = group.scratch.view(2, num, kv_heads, -1, head_dim)
        query = heads.query[group.start : group.stop].reshape(num, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=group.mask(heads.window), scale=heads.scaling
        )
        return out.reshape(num, -1, head_dim)

    def _prefill(self, batch: PackedBatch, layer: int, heads: Heads, span: PrefillSpan) -> torch.Tensor:
        kv_heads, head_dim = heads.key.shape[1:]
        torch.index_select(batch.memory.block_rows[layer], 0, span.read_rows, out=span.scratch)
        keys, values = span.scratch.view(2, 1, kv_heads, -1, head_dim)[:, :, :, : span.length].unbind()
        query = heads.query[span.start : span.stop].transpose(0, 1).unsqueeze(0)
        mask = span.mask(heads.window)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=heads.scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)


BACKENDS = ("native", "reference")


def make_backend(name: str, card: ModelCard, dtype: str, kernels: Kernels | None) -> AttentionBackend:
    """The backend of that name; ``auto``: the fastest that computes this model here.

    Raises:
        KeyError: there is none.
        ValueError: it does not compute this model; says why.
    """
    from services.engine.native.attention import NativeBackend, why_not

    if name not in ("auto", *BACKENDS):
        raise KeyError(name)
    reason = "there are no native kernels here" if kernels is None else why_not(card.head_dim, dtype)
    if name == "native" and reason:
        raise ValueError(reason)
    if name == "reference" or reason or kernels is None:
        return ReferenceBackend()
    return NativeBackend(kernels)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls once per layer: Q [1, heads, T, head_dim], K and V [1, kv_heads, T, head_dim].

    Returns:
        [1, T, heads, head_dim], and no weights.
    Raises:
        UnsupportedAttention: an argument that changes the result and is not known here.
    """
    batch: PackedBatch | None = kwargs.pop("kv_batch", None)
    if batch is None:
        raise UnsupportedAttention("the model does not hand keyword arguments down to its attention")
    scaling, window = kwargs.pop("scaling", None), kwargs.pop("sliding_window", None)
    if kwargs.pop("dropout", 0.0) or attention_mask is not None:
        raise UnsupportedAttention("the model asks for dropout or brings an attention mask of its own")
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise UnsupportedAttention(f"the model's attention needs {', '.join(sorted(unknown))}")
    if key.shape != value.shape:
        raise UnsupportedAttention(f"K and V differ in shape: {tuple(key.shape)} and {tuple(value.shape)}")
    if key.shape[1] != batch.memory.num_kv_heads or key.shape[3] != batch.memory.head_dim:
        raise UnsupportedAttention(
            f"a layer has {key.shape[1]} KV heads of {key.shape[3]}, the KV memory "
            f"{batch.memory.num_kv_heads} of {batch.memory.head_dim}"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads = Heads(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        window or 0,
    )
    batch.asked[layer] = heads.scaling, heads.window
    batch.backend.write(batch, layer, heads)
    if batch.on_layer is not None:
        batch.on_layer(layer)
    return batch.backend.read(batch, layer, heads).unsqueeze(0), None


def register() -> None:
    """Make `attend` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
