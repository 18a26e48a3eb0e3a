"""Logprobs of the engine against transformers' own logits: of outputs and of prompts, cold, warm, in chunks, moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.loader import LoadedModel
from services.engine.messages import (
    Penalties,
    Reserved,
    ReserveSequence,
    Sampling,
    SequenceOutput,
    StartSequence,
    TokenLogprobs,
)
from tests.engine_harness import Harness, sequence
from tests.golden.oracle import license_prompts

TOLERANCE = 1e-3
LENGTH, NUM_TOKENS, TOPS = 40, 8, 5
TOLD = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=TOPS, prompt_logprobs=TOPS)
SHAPED = Sampling(
    max_tokens=14,  # past the end of a block
    ignore_eos=True,
    temperature=1.3,
    top_p=0.9,
    seed=4,
    min_p=0.01,
    logprobs=TOPS,
    penalties=Penalties(presence=0.5, frequency=0.5, repetition=1.3),
    logit_bias=((30, 3.0),),
)


@pytest.fixture(scope="module")
def prompt(default_model_folder: Path) -> list[int]:
    return license_prompts(default_model_folder, [LENGTH])[0]


@pytest.fixture(scope="module")
def oracle(default_model_folder: Path) -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()


def truth(oracle: object, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab]: row i tells how likely each token is after ids[: i + 1]."""
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([ids])).logits[0], dim=-1)  # type: ignore[operator]


def check(told: TokenLogprobs, row: torch.Tensor, token_id: int, tops: int) -> None:
    assert abs(told.logprob - float(row[token_id])) < TOLERANCE
    assert len(told.top_ids) == len(told.top_logprobs) == tops
    best = row.topk(tops).values
    assert torch.allclose(torch.tensor(told.top_logprobs), best, atol=TOLERANCE)
    assert torch.allclose(row[list(told.top_ids)], best, atol=TOLERANCE)
    assert int((row > row[token_id] + TOLERANCE).sum()) < told.rank <= int((row > row[token_id] - TOLERANCE).sum()) + 1


def answer(harness: Harness, seq_id: str) -> tuple[list[int], list[TokenLogprobs]]:
    mine = [o for o in harness.outputs() if o.seq_id == seq_id and o.token_ids]
    return [t for o in mine for t in o.token_ids], [x for o in mine for x in o.logprobs]


def prompt_told(harness: Harness, seq_id: str) -> dict[int, TokenLogprobs]:
    """By index of the prompt token; checks that nothing comes twice."""
    found: dict[int, TokenLogprobs] = {}
    parts: list[SequenceOutput] = [o for o in harness.outputs() if o.seq_id == seq_id and o.prompt_logprobs]
    for part in parts:
        for i, told in enumerate(part.prompt_logprobs, start=part.prompt_start):
            assert i not in found
            found[i] = told
    return found


def test_outputs_and_prompt_are_as_likely_as_transformers_says(
    model: LoadedModel, oracle: object, prompt: list[int]
) -> None:
    harness = Harness(model, num_blocks=64, max_num_batched_tokens=13)
    harness.send(sequence("cold", prompt, sampling=TOLD), sequence("other", prompt[7:30], sampling=Sampling()))
    harness.run()
    harness.send(sequence("warm", prompt, sampling=TOLD))
    harness.run()
    for name in ("cold", "warm"):
        ids, told = answer(harness, name)
        rows = truth(oracle, prompt + ids)
        assert len(told) == len(ids) == NUM_TOKENS
        for i, (token_id, x) in enumerate(zip(ids, told, strict=True)):
            check(x, rows[LENGTH - 1 + i], token_id, TOPS)
        of_prompt = prompt_told(harness, name)
        assert sorted(of_prompt) == list(range(1, LENGTH))
        for i, x in of_prompt.items():
            check(x, rows[i - 1], prompt[i], TOPS)
    assert harness.end("warm").cached_tokens == 0  # its logits were needed, so nothing was taken from the cache


def test_they_are_told_before_anything_is_done_to_the_logits(
    model: LoadedModel, oracle: object, prompt: list[int]
) -> None:
    harness = Harness(model, num_blocks=64)
    harness.send(sequence("a", prompt, sampling=SHAPED))
    harness.run()
    ids, told = answer(harness, "a")
    rows = truth(oracle, prompt + ids)
    for i, (token_id, x) in enumerate(zip(ids, told, strict=True)):
        check(x, rows[LENGTH - 1 + i], token_id, TOPS)


def test_penalties_and_logprobs_outlive_a_hand_off_and_a_preemption(model: LoadedModel, prompt: list[int]) -> None:
    alone = Harness(model, num_blocks=64)
    alone.send(sequence("a", prompt, sampling=SHAPED))
    alone.run()
    expected, expected_told = answer(alone, "a")
    plain = Harness(model, num_blocks=64)
    plain.send(
        sequence("a", prompt, sampling=Sampling(temperature=1.3, top_p=0.9, seed=4, max_tokens=14, ignore_eos=True))
    )
    plain.run()
    assert plain.tokens("a") != expected, "the penalties change nothing here"

    tight = Harness(model, num_blocks=7)
    tight.send(*(sequence(n, prompt, sampling=SHAPED, named=False) for n in ("a", "b")))
    tight.run()
    assert tight.engine.stats().preemptions
    for name in ("a", "b"):
        assert answer(tight, name)[0] == expected

    moved = hand_off(model, prompt, SHAPED)
    ids, told = answer(moved, "a")
    assert ids == expected
    assert [x.top_ids for x in told] == [x.top_ids for x in expected_told]
    assert all(abs(x.logprob - y.logprob) < TOLERANCE for x, y in zip(told, expected_told, strict=True))


def hand_off(model: LoadedModel, prompt: list[int], sampling: Sampling) -> Harness:
    """The reader of a hand-off, after its end."""
    writer, reader = Harness(model, num_blocks=16), Harness(model, num_blocks=16)
    writer.send(sequence("a", prompt, sampling=sampling, hand_off=True))
    reader.send(ReserveSequence(sequence=sequence("a", prompt, sampling=sampling)))
    writer.run()
    reader.run()
    target = reader.of(Reserved)[0].block_ids
    source = writer.scheduler.roster.sequences["a"].block_ids
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in zip(source, target, strict=True):
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)
    first = next(o for o in writer.outputs() if o.token_ids)
    told = ((0, first.logprobs[0]),) if first.logprobs else ()
    reader.send(StartSequence(seq_id="a", first_tokens=((0, first.token_ids[0]),), first_logprobs=told))
    reader.run()
    return reader
