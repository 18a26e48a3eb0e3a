"""The sampler against a slow one that sorts in plain Python."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.messages import Sampling
from services.engine.sampler import BadLogits, Draw, sample, uniform


def slow_choice(logits: list[float], draw: Draw) -> int:
    """The rule, spelled out: temperature, top_k, top_p, then the inverse of the cumulated weights by id."""
    s = draw.sampling
    allowed = {i: x for i, x in enumerate(logits) if i not in draw.banned}
    if s.temperature < 1e-5:
        return max(allowed, key=lambda i: (allowed[i], -i))
    top = max(allowed.values())
    weights = {i: math.exp((x - top) / s.temperature) for i, x in allowed.items()}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if s.top_k > 0:
        ranked = ranked[: s.top_k]
    if s.top_p < 1:
        total, held, kept = sum(weights[i] for i in ranked), 0.0, []
        for i in ranked:
            kept.append(i)
            held += weights[i]
            if held >= s.top_p * total:
                break
        ranked = kept
    goal = uniform(s.seed, draw.position) * sum(weights[i] for i in ranked)
    held = 0.0
    for i in sorted(ranked):
        held += weights[i]
        if held > goal:
            return i
    return max(ranked)


@settings(max_examples=300, deadline=None)
@given(
    # multiples of 1/8 make ties frequent and sums exact enough that both sides agree at the edges
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([0.05, 0.37, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 5000),
)
def test_it_draws_what_the_plain_rule_draws(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    draw = Draw(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), position)
    assert sample(torch.tensor([logits]), [draw]) == [slow_choice(logits, draw)]


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(16, 300, generator=generator) * 3
    draws = [
        Draw(Sampling(temperature=t, top_k=k, top_p=p, seed=i), i * 7, banned=(i,))
        for i, (t, k, p) in enumerate([(0, 0, 1.0), (0.7, 0, 1.0), (1.0, 20, 0.9), (1.3, 0, 0.5)] * 4)
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draws[i]])[0] for i in range(16)]
    assert together == sample(logits, draws)


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = [Draw(Sampling(temperature=1.0, seed=11), position) for position in range(4000)]
    tokens = sample(logits.expand(len(draws), -1), draws)
    expected = logits[0].softmax(0)
    for token in range(4):
        share = tokens.count(token) / len(tokens)
        assert abs(share - float(expected[token])) < 4 * math.sqrt(float(expected[token]) / len(tokens))


def test_the_number_behind_a_draw_depends_on_its_arguments_alone() -> None:
    code = "from services.engine.sampler import uniform; import sys; sys.stdout.write(repr(uniform(42, 7)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(other.stdout) == uniform(42, 7)
    values = {uniform(seed, position, choice) for seed in range(5) for position in range(5) for choice in range(3)}
    assert len(values) == 75
    assert all(0 <= v < 1 for v in values)


def test_banned_tokens_never_come() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    assert sample(logits, [Draw(Sampling(), 0, banned=(0,))]) == [1]
    assert logits[0, 0] == 9.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_fail_their_row_and_no_other(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0], [3.0, 1.0, 2.0]])
    first, second, third = sample(logits, [Draw(Sampling(temperature=t, seed=1), 0) for t in (0.0, 1.0, 0.0)])
    assert (first, third) == (2, 0)
    assert isinstance(second, BadLogits)


def test_a_row_with_everything_banned_fails() -> None:
    assert isinstance(sample(torch.zeros(1, 2), [Draw(Sampling(), 0, banned=(0, 1))])[0], BadLogits)


def test_a_minute_temperature_is_greedy_and_a_small_one_does_not_overflow() -> None:
    logits = torch.tensor([[0.0, 50.0, 49.0]])
    assert sample(logits, [Draw(Sampling(temperature=9e-6, seed=3), 0)]) == [1]
    assert sample(logits, [Draw(Sampling(temperature=1e-4, seed=3), 0)]) == [1]
