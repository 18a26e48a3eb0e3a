"""In bfloat16 texts may part at a near tie; logits stay close, and the favourite is the same where it leads clearly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.batch import PagedMemory, Span
from services.engine.loader import LoadedModel, load_model
from tests.golden.oracle import license_prompts

TOLERANCE = {"generic": 3.0, "fused": 1.5}
"""Largest difference of a logit from float32; logits span 70. transformers' own bfloat16 differs by 2.7 here."""
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def half(default_model_folder: Path) -> LoadedModel:
    return load_model(default_model_folder, dtype="bfloat16")


@pytest.fixture(scope="module")
def prompt(default_model_folder: Path) -> list[int]:
    return license_prompts(default_model_folder, [160])[0]


@pytest.fixture(scope="module")
def teacher(default_model_folder: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' own logits of every position, in one pass and in float32: [tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()


def paged_logits(model: LoadedModel, prompt: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position, computed in chunks over blocks in falling order."""
    card = model.card
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    shape = (num_blocks, 2, card.num_kv_heads, BLOCK_SIZE, card.head_dim)
    memory = PagedMemory.over([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(card.num_layers)])
    table, parts = list(range(num_blocks))[::-1], []
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        done = model.path.forward(memory, [Span(ids, start, table)], [(0, i) for i in range(len(ids))])
        assert done.sound == (True,)
        parts.append(done.logits.float())
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [9, 64, 160])
def test_logits_stay_within_the_tolerance_and_clear_favourites_agree(
    chunk: int, half: LoadedModel, prompt: list[int], teacher: torch.Tensor
) -> None:
    logits = paged_logits(half, prompt, chunk)
    error = float((logits - teacher).abs().max())
    tolerance = TOLERANCE[half.path.name.partition(":")[0]]
    assert error <= tolerance, f"logits differ by up to {error}"
    best = teacher.topk(2).values
    clear = best[:, 0] - best[:, 1] > tolerance
    assert int(clear.sum()) >= 20
    agree = logits.argmax(-1) == teacher.argmax(-1)
    assert bool(agree[clear].all())
