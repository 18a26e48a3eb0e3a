"""A prepared folder becomes a model that computes on paged memory, or is refused with the reason.

Three gates, each cheaper than a wrong answer: the config says what cannot work, the first forward shows what the
attention really asks for, and a short text computed in two chunks over shuffled blocks must equal transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import ConfigError
from services.engine import attention
from services.engine.attention import AttentionBackend, UnsupportedAttention
from services.engine.batch import PackedBatch, PagedMemory, Span, pack
from services.protocol.model_card import ModelCard

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_UNSTEADY_ROPE = {
    "dynamic",
    "longrope",
}  # rotate a token by the longest position of the batch, so chunking changes them
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
_CHECK_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of the norm of the logits


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; `forward` is its only use."""

    card: ModelCard
    module: Any  # transformers' own class
    dtype: str
    backend: AttentionBackend


def check_config(config: Any, name: str) -> None:
    """Raise ConfigError, saying why, for an architecture that cannot be served."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = type(config).__name__
    missing = [key for key in _NEEDED if getattr(config, key, None) is None]
    if getattr(config, "is_encoder_decoder", False) or missing:
        raise ConfigError(f"model.path: {name} ({kind}) is no plain decoder: its config lacks {', '.join(missing)}")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if not getattr(cls, "_supports_attention_backend", False):
            raise ConfigError(f"model.path: {name}: the attention of {cls.__name__} cannot be replaced in transformers")
    elif "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise ConfigError(f"model.path: {name} ({kind}) has no class for text generation in transformers")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if others:
        raise ConfigError(f"model.path: {name} has layers of another kind than attention over KV: {', '.join(others)}")
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(f"model.path: {name} keeps a latent state instead of K and V of equal shapes")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"model.path: {name} holds quantized weights; give a GGUF file or plain safetensors")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in _UNSTEADY_ROPE:
        raise ConfigError(
            f"model.path: {name} scales positions by {rope['rope_type']}, which chunked prefill would change"
        )


def load_model(
    folder: Path, *, dtype: str, backend: str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """Load weights, put our attention in, and check it.

    Args:
        folder: a prepared one.
        dtype: of weights and KV, resolved.
    Raises:
        ConfigError: the folder is not prepared, the backend unknown, or the architecture is refused; says why.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.engine.prepare import quiet_transformers

    quiet_transformers()
    card = ModelCard.load(folder)
    check_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), card.name)
    try:
        made = attention.make_backend(backend)
    except KeyError:
        known = ", ".join(sorted(attention.BACKENDS))
        raise ConfigError(f"engine.attention must be auto or one of {known}, got {backend!r}") from None
    attention.register()
    module: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.NAME,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    module.to(torch.device(device)).eval().requires_grad_(False)
    loaded = LoadedModel(card, module, dtype, made)
    _check_attention(loaded)
    return loaded


def forward(loaded: LoadedModel, batch: PackedBatch, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a packed batch.

    Args:
        rows: positions in the packed row whose logits are wanted; may be empty.
    Returns:
        logits [len(rows), vocab], and a bool for each token of the row: its last hidden state is finite.
    """
    finite: list[torch.Tensor] = []

    def watch(_module: Any, _args: Any, output: Any) -> None:
        finite.append(torch.isfinite(output[0][0].sum(-1)))

    handle = loaded.module.base_model.register_forward_hook(watch)
    try:
        with torch.inference_mode():
            output = loaded.module(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=rows,
                kv_batch=batch,
            )
    finally:
        handle.remove()
    return output.logits[0], finite[0]


def _check_attention(loaded: LoadedModel) -> None:
    """Compute a few tokens in two chunks over shuffled blocks and compare with transformers' eager attention."""
    card, module = loaded.card, loaded.module
    dtype, device = next(module.parameters()).dtype, next(module.parameters()).device
    shape = (8, 2, card.num_kv_heads, 4, card.head_dim)
    layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(card.num_layers)]
    memory = PagedMemory.over(layers)
    ids = [(7 * i + 3) % card.vocab_size for i in range(_CHECK_TOKENS)]
    table, cut = [5, 2, 7, 0, 3, 6], _CHECK_TOKENS // 2 + 1
    seen: list[int] = []
    try:
        for start, stop in ((0, cut), (cut, _CHECK_TOKENS)):
            span = Span(ids[start:stop], start, table)
            logits, _ = forward(
                loaded, pack(memory, loaded.backend, [span], seen.append), torch.tensor([stop - start - 1])
            )
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
    error = float((logits.float() - expected.float()).norm() / expected.float().norm())
    if not error < _TOLERANCE[dtype]:
        raise ConfigError(
            f"model.path: {card.name} ({card.architecture}) computes something else over paged memory: "
            f"logits differ by {error:.2g} of their norm"
        )
