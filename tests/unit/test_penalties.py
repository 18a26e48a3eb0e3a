"""Penalties, biases, masks and cuts against transformers' own processors and against rules in plain Python."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.engine.messages import Penalties, Sampling
from services.engine.sampler import BadLogits, Draw, sample, uniform

VOCAB = 50


def slow_row(logits: list[float], draw: Draw) -> list[float]:
    """The rule, spelled out: mask, ban, bias, repetition, frequency, presence."""
    s, row = draw.sampling, list(logits)
    outputs = Counter(draw.token_ids[draw.num_prompt_tokens :])
    for i in range(len(row)):
        if i in draw.banned or (draw.allowed is not None and not draw.allowed[i]):
            row[i] = float("-inf")
        row[i] += dict(s.logit_bias).get(i, 0.0)
        if s.penalties is not None:
            if i in draw.token_ids:
                row[i] = row[i] / s.penalties.repetition if row[i] > 0 else row[i] * s.penalties.repetition
            row[i] -= outputs[i] * s.penalties.frequency + (s.penalties.presence if outputs[i] else 0.0)
    return row


PENALTIES = st.builds(
    Penalties,
    presence=st.sampled_from([-2.0, -0.5, 0.0, 0.75, 2.0]),
    frequency=st.sampled_from([-1.0, 0.0, 0.25, 2.0]),
    repetition=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=12, max_size=12),
    penalties=st.none() | PENALTIES,
    bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, -1.5, 0.0, 2.25, 100.0]), max_size=4),
    token_ids=st.lists(st.integers(0, 11), max_size=12),
    cut=st.integers(0, 12),
    banned=st.sets(st.integers(0, 11), max_size=3),
    allowed=st.none() | st.sets(st.integers(0, 11), min_size=5),
)
def test_a_greedy_token_is_the_largest_of_the_plain_rules_row(
    logits: list[float],
    penalties: Penalties | None,
    bias: dict[int, float],
    token_ids: list[int],
    cut: int,
    banned: set[int],
    allowed: set[int] | None,
) -> None:
    mask = None if allowed is None else torch.tensor([i in allowed for i in range(12)])
    sampling = Sampling(penalties=penalties, logit_bias=tuple(sorted(bias.items())))
    draw = Draw(sampling, 0, banned, 0, token_ids, min(cut, len(token_ids)), mask)
    row = slow_row(logits, draw)
    given_row = torch.tensor([logits])
    assert sample(given_row, [draw]) == [max(range(12), key=lambda i: (row[i], -i))]
    assert given_row[0].tolist() == logits, "the model's own logits changed"


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_that_transformers_processors_leave(seed: int) -> None:
    dice = random.Random(seed)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    ids = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 30))]
    sampling = Sampling(
        temperature=dice.choice([0.4, 1.0, 1.7]),
        min_p=dice.choice([0.0, 0.02, 0.3]),
        top_k=dice.choice([0, 5, 30]),
        top_p=dice.choice([1.0, 0.9, 0.4]),
        seed=seed,
        penalties=Penalties(repetition=dice.choice([0.6, 1.3, 1.9])),
    )
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(sampling.penalties.repetition), TemperatureLogitsWarper(sampling.temperature)]
    )
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    left = processors(torch.tensor([ids]), logits.double())[0].softmax(-1).cumsum(0)
    for position in range(20):
        expected = int(torch.searchsorted(left, uniform(seed, position), right=True))
        draw = Draw(sampling, position, token_ids=ids, num_prompt_tokens=len(ids) // 2)
        assert sample(logits, [draw]) == [expected], f"seed {seed}, position {position}, {sampling}"


def test_nobodys_row_changes_with_the_company() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)) * 3
    mask = torch.rand(300, generator=torch.Generator().manual_seed(4)) > 0.3
    kinds = [
        Draw(Sampling(), 0),
        Draw(Sampling(logit_bias=((7, 100.0),)), 0),
        Draw(
            Sampling(temperature=1.0, seed=5, penalties=Penalties(frequency=1.5, repetition=1.2)),
            3,
            (),
            0,
            [1, 2, 2],
            1,
        ),
        Draw(Sampling(temperature=0.9, seed=6, min_p=0.1), 1),
        Draw(Sampling(), 2, allowed=mask),
        Draw(Sampling(), 2, banned=(0, 1)),
    ]
    together = sample(logits, kinds)
    assert together == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(kinds)]
    assert together[1] == 7


def test_a_grammar_at_its_end_is_stronger_than_min_tokens() -> None:
    end = torch.zeros(5, dtype=torch.bool)
    end[2] = True
    draw = Draw(Sampling(min_tokens=9), 0, banned=(2,), allowed=end)
    assert sample(torch.zeros(1, 5), [draw]) == [2]
    end[3] = True
    assert sample(torch.zeros(1, 5), [Draw(Sampling(min_tokens=9), 0, banned=(2,), allowed=end)]) == [3]


def test_a_row_without_numbers_fails_under_a_mask_too() -> None:
    allowed = torch.ones(3, dtype=torch.bool)
    bad = sample(torch.full((1, 3), float("nan")), [Draw(Sampling(), 0, allowed=allowed)])
    assert isinstance(bad[0], BadLogits)


def test_a_large_vocabulary_is_cut_as_if_it_were_sorted_whole() -> None:
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1)) * 2
    for top_p in (0.3, 0.8, 0.97, 0.9999):
        sampling = Sampling(temperature=1.3, top_p=top_p, seed=9)
        left = TopPLogitsWarper(top_p)(torch.zeros(1, 0), logits.double() / 1.3)[0].softmax(-1).cumsum(0)
        for position in range(20):
            expected = int(torch.searchsorted(left, uniform(9, position), right=True))
            assert sample(logits, [Draw(sampling, position)]) == [expected], (top_p, position)
