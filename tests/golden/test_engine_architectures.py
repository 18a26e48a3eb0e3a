"""Random models of many architectures: greedy text over paged memory equals transformers', or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvstore.errors import ConfigError
from services.engine.loader import check_config, load_model
from services.engine.messages import Sampling
from services.engine.prepare import prepare
from tests.conftest import make_byte_tokenizer
from tests.engine_harness import Harness, sequence
from tests.golden.oracle import generate
from tests.native_models import kernels

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
SERVED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 11},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "Olmo2": {},
    "Cohere": {"logit_scale": 0.25},
    "Phi3": {},
    "Gemma3": {"sliding_window": 10, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "Starcoder2": {"sliding_window": None},
}
REFUSED = {"Gemma2": "softcap"}


def make(name: str, folder: Path, settings: dict[str, Any]) -> Path:
    """A prepared random model; equal names give equal weights."""
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    torch.manual_seed(3)
    config = getattr(transformers, name + suffix)(**{**SMALL, **settings})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder / "source")
    make_byte_tokenizer(folder / "source")
    return prepare(str(folder / "source"), cache_dir=folder / "cache", dtype="auto", progress=lambda _: None)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_transformers(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path, SERVED[name])
    prompts = [[(i * 37 + n) % 500 + 5 for i in range(n)] for n in (1, 16, 45)]
    expected = generate(folder, prompts, 24)
    harness = Harness(load_model(folder, dtype="float32"), num_blocks=64, block_size=4, max_num_batched_tokens=7)
    for i, item in enumerate(expected):
        sampling = Sampling(max_tokens=24, ignore_eos=True)
        harness.send(sequence(str(i), item.prompt, sampling=sampling, block_size=4))
    harness.run()
    for i, item in enumerate(expected):
        item.check(harness.tokens(str(i)), name)


WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}


@pytest.mark.parametrize("name", ["Mixtral", "Phi3", "Gemma3", "Granite"])
def test_greedy_text_over_the_native_attention_is_transformers(name: str, tmp_path: Path) -> None:
    kernels("auto")
    folder = make(name, tmp_path, {**SERVED[name], **WIDE})
    model = load_model(folder, dtype="float32")
    assert model.path.name == "generic:native"
    expected = generate(folder, [[(i * 37 + n) % 500 + 5 for i in range(n)] for n in (1, 16, 100)], 24)
    harness = Harness(model, num_blocks=64, block_size=16, max_num_batched_tokens=23)
    for i, item in enumerate(expected):
        harness.send(sequence(str(i), item.prompt, sampling=Sampling(max_tokens=24, ignore_eos=True)))
    harness.run()
    for i, item in enumerate(expected):
        item.check(harness.tokens(str(i)), name)


@pytest.mark.parametrize("name", REFUSED)
def test_attention_of_another_kind_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path, {})
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV3", "latent state"),
        ("Mamba2", "state-space or linear layers"),
        ("Jamba", "state-space or linear layers"),
        ("FalconH1", "state-space or linear layers"),
        ("Qwen3Next", "state-space or linear layers"),
        ("RecurrentGemma", "state-space or linear layers"),
        ("MiniMax", "linear_attention"),
        ("T5", "no plain decoder"),
    ],
)
def test_a_model_whose_past_is_no_kv_is_refused_by_its_config(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_config(getattr(transformers, f"{name}Config")(), name)
