"""Prompts of given lengths and what plain transformers answers to them: the oracle of every exactness test."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
)
# fmt: on
EDGES = (1, 2, 15, 16, 17, 31, 32, 33)
QUICK_LENGTHS = (1, 15, 16, 17, 32, 33, 200, 700)


def all_lengths() -> tuple[int, ...]:
    """64 lengths from 1 to 1,500, the edges of blocks among them, the rest spread evenly on a logarithmic scale."""
    rng, drawn = random.Random(7), set[int]()
    while len(drawn) < 64 - len(EDGES) - 1:
        drawn.add(int(34 * (1500 / 34) ** rng.random()))
    return (*EDGES, *sorted(drawn), 1500)


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of common English words in the default model's vocabulary, where each is one token."""
    rng = random.Random(num_tokens * 1000 + seed)
    return tuple(_ids()[rng.randrange(len(WORDS))] for _ in range(num_tokens))


@functools.cache
def _ids() -> tuple[int, ...]:
    from tokenizers import Tokenizer

    from services.config import home
    from services.engine.prepare import prepare

    folder = prepare("default", cache_dir=home() / "models", dtype="auto", progress=lambda _: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(" " + word, add_special_tokens=False).ids for word in WORDS]
    assert all(len(x) == 1 for x in ids)
    return tuple(x[0] for x in ids)


@functools.cache
def _model(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the workers under test need the other core
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


@functools.cache
def greedy(folder: Path, prompt_ids: tuple[int, ...], num_tokens: int = 32) -> tuple[int, ...]:
    """What transformers' own generate continues with in fp32, end tokens ignored."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt_ids])
        out = _model(folder, "float32").generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt_ids) :].tolist())


def text(folder: Path, ids: tuple[int, ...]) -> str:
    """What these ids read as, special tokens left out."""
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(list(ids)))
