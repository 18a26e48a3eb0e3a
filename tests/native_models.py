"""Small random models whose shapes the native kernels take, and the kinds of kernels that this machine can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.engine.native.build import KINDS, NoKernels, cpu_flags
from services.engine.native.library import Kernels, load_kernels
from services.engine.prepare import prepare
from tests.conftest import make_byte_tokenizer

RUNNABLE = [kind.name for kind in KINDS if kind.cpu_flags <= cpu_flags()]
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
FAMILY: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 37},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
    "Qwen3": {"head_dim": 64},
}


def kernels(kind: str) -> Kernels:
    """Skips the test where the machine has no compiler; that a CPU lacks a kind is no reason to come here."""
    try:
        return load_kernels(kind)
    except NoKernels as exc:
        pytest.skip(f"no native kernels: {exc}")


def make_model(name: str, folder: Path, **settings: Any) -> Path:
    """A prepared random model of an architecture; equal arguments give equal weights."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **FAMILY.get(name, {}), **settings})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder / "source")
    make_byte_tokenizer(folder / "source")
    return prepare(str(folder / "source"), cache_dir=folder / "cache", dtype="auto", progress=lambda _: None)
