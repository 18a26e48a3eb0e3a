"""A prepared folder becomes a model that computes on paged memory, or is refused with the reason.

Four gates, each cheaper than a wrong answer: the config says what cannot work, the first forward shows what the
attention really asks for, a short text computed in two chunks over shuffled blocks must equal transformers' own, and
the fused path, where there is one, must equal the generic one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import ConfigError
from services.engine import attention
from services.engine.computation import ModelPath
from services.engine.generic import GenericPath
from services.engine.likeness import check_equal, check_paged
from services.engine.native.build import NoKernels
from services.engine.native.fused import FusedPath, NotFused
from services.engine.native.library import Kernels, load_kernels
from services.protocol.model_card import ModelCard

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_UNSTEADY_ROPE = {
    "dynamic",
    "longrope",
}  # rotate a token by the longest position of the batch, so chunking changes them
_STATE = ("state_size", "mamba_d_state", "ssm_state_size", "linear_num_key_heads", "lru_width")
_NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")

log = logging.getLogger("pdray.engine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: ``path.forward`` is its only use."""

    card: ModelCard
    dtype: str
    path: ModelPath
    attention: str  # the backend's name
    note: str = ""  # why a faster path was not taken

    @property
    def is_batch_invariant(self) -> bool:
        """A sequence's numbers do not depend on its neighbours, on chunks, or on cache hits."""
        return isinstance(self.path, FusedPath)


def check_config(config: Any, name: str) -> None:
    """Raise ConfigError, saying why, for an architecture that cannot be served."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = type(config).__name__
    state = next((key for key in _STATE if getattr(config, key, None)), None)
    if state:
        raise ConfigError(
            f"model.path: {name} ({kind}) has state-space or linear layers ({state}); their state is no KV of blocks"
        )
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
    folder: Path,
    *,
    dtype: str,
    backend: str = "auto",
    kernels: str = "auto",
    max_model_len: int = 0,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load weights, put our attention in, check it, and take the fastest path that gives the same numbers.

    Args:
        folder: a prepared one.
        dtype: of weights and KV, resolved.
        kernels: ``auto``, ``off``, or a name of `services.engine.native.build.KINDS`.
        max_model_len: longest sequence; 0: the model's own limit.
    Raises:
        ConfigError: the folder is not prepared, a setting cannot be met, or the architecture is refused; says why.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.engine.prepare import quiet_transformers

    quiet_transformers()
    card = ModelCard.load(folder)
    check_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), card.name)
    native, note = _native(kernels)
    try:
        made = attention.make_backend(backend, card, dtype, native)
    except KeyError:
        known = ", ".join(sorted(attention.BACKENDS))
        raise ConfigError(f"engine.attention must be auto or one of {known}, got {backend!r}") from None
    except ValueError as exc:
        raise ConfigError(f"engine.attention: {backend} cannot serve {card.name}: {exc}") from None
    attention.register()
    module: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.NAME,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    module.eval().requires_grad_(False)
    generic = GenericPath(module, made)
    check_paged(card, generic)
    loaded = LoadedModel(card, dtype, generic, made.name, note)
    if native is None or backend not in ("auto", "native"):
        return loaded
    try:
        positions = max_model_len or card.max_model_len
        fused = FusedPath(native, module, generic.asked, positions, torch.get_num_threads())
        check_equal(card, generic, fused)
    except NotFused as exc:
        return replace(loaded, note=str(exc))
    return replace(loaded, path=fused)


def _native(kernels: str) -> tuple[Kernels | None, str]:
    """The native kernels, or why there are none. A kind that was asked for by name must be there."""
    if kernels == "off":
        return None, "engine.kernels is off"
    try:
        return load_kernels(kernels), ""
    except NoKernels as exc:
        if kernels != "auto":
            raise ConfigError(f"engine.kernels: {exc}") from None
        log.warning("without native kernels: %s", exc)
        return None, str(exc)
