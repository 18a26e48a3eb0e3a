"""What transformers itself generates, token by token, with the margin of each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LICENSE = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True)
class Expected:
    """A prompt and transformers' greedy continuation of it, end tokens ignored."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]  # by how much the best logit leads the second

    def check(self, tokens: Sequence[int], what: str) -> None:
        """Raise AssertionError that names the first difference and how close the choice was there."""
        if list(tokens) == self.tokens[: len(tokens)]:
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=False)) if a != b)
        raise AssertionError(
            f"{what}, prompt of {len(self.prompt)}: token {at} is {tokens[at]}, transformers has {self.tokens[at]} "
            f"with a margin of {self.margins[at]:.2g}"
        )


def license_prompts(folder: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Stretches of plain English, each from another place, with so many tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(LICENSE.read_text()).ids
    return [(ids[37 * i :] + ids)[:length] for i, length in enumerate(lengths)]


def generate(folder: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[Expected]:
    """Greedy, float32, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(out.logits).squeeze(1).topk(2).values
        found.append(Expected(prompt, out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return found


def mean_states(folder: Path, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """[hidden] of each prompt: the mean of transformers' last hidden states over its tokens, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].mean(0) for prompt in prompts
        ]
