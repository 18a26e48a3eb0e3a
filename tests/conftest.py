"""Models that tests share: the default one, prepared once into pdray's cache, and a tiny one made on the spot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.config import home
from services.engine.prepare import prepare


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """SmolLM2-135M-Instruct, prepared; the first run on a machine takes half a minute."""
    return prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)


@pytest.fixture(scope="session")
def tiny_source_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with the default model's tokenizer cut to 512 ids, as a hub folder would hold it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tiny_source_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, prepared."""
    cache = tmp_path_factory.mktemp("prepared")
    return prepare(str(tiny_source_folder), cache_dir=cache, dtype="auto", progress=lambda _: None)


@pytest.fixture(scope="session")
def invariant_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, prepared, that the fused path takes where the CPU has one: no sum depends on how a sequence is cut,
    so that seeded answers, which near-ties decide once in ten thousand tokens, are the same wherever they were cut."""
    source = tmp_path_factory.mktemp("tiny-invariant")
    make_tiny_llama(source, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    return prepare(str(source), cache_dir=tmp_path_factory.mktemp("prepared"), dtype="auto", progress=lambda _: None)


def make_tiny_llama(folder: Path, seed: int = 0, **settings: object) -> None:
    """Write config.json, model.safetensors and a byte-level tokenizer of 512 ids; equal seeds give equal weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "vocab_size": 512,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,  # wide, so that random weights have clear favourites
        **settings,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
    make_byte_tokenizer(folder)


def make_byte_tokenizer(folder: Path) -> None:
    """A real BPE: 3 special tokens, 256 bytes, and merges of common pairs up to 512 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " ".join(f"{a}{b}ing the {b}{a}er of {a} and {b}tion" for a in "abcdefghij" for b in "klmnopqrst")
    tokenizer.train_from_iterator([words], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
                "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            }
        )
    )


def copy_folder(source: Path, target: Path) -> Path:
    """A copy whose files may be changed; links are followed."""
    return Path(shutil.copytree(source, target))
