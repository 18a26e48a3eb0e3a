"""A seeded answer is the same text alone, in company, in chunks, from the cache, preempted and moved."""

from __future__ import annotations

import pytest

from services.engine.loader import LoadedModel
from services.engine.messages import Reserved, ReserveSequence, Sampling, StartSequence
from tests.engine_harness import Harness, sequence
from tests.golden.oracle import Expected

SAMPLINGS = {
    "plain": Sampling(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True),
    "nucleus": Sampling(temperature=0.8, top_p=0.9, seed=2**63 + 5, max_tokens=20, ignore_eos=True),
    "top-k": Sampling(temperature=1.2, top_k=40, top_p=0.95, seed=1, max_tokens=20, ignore_eos=True),
}


@pytest.fixture(scope="module")
def alone(model: LoadedModel, expected: dict[int, Expected]) -> dict[str, list[int]]:
    """Each kind of sampling by itself on a fresh engine."""
    found = {}
    for name, sampling in SAMPLINGS.items():
        harness = Harness(model, num_blocks=32)
        harness.send(sequence(name, expected[33].prompt, sampling=sampling))
        harness.run()
        found[name] = harness.tokens(name)
    return found


def test_samplings_differ_from_one_another_and_from_greedy(
    alone: dict[str, list[int]], expected: dict[int, Expected]
) -> None:
    texts = {tuple(t) for t in alone.values()} | {tuple(expected[33].tokens[:20])}
    assert len(texts) == 4


def test_in_company_in_chunks_and_cached(
    model: LoadedModel, alone: dict[str, list[int]], expected: dict[int, Expected]
) -> None:
    harness = Harness(model, max_num_batched_tokens=11)
    for turn in ("cold", "cached"):
        for name, sampling in SAMPLINGS.items():
            harness.send(sequence(f"{name}-{turn}", expected[33].prompt, sampling=sampling))
        harness.send(sequence(f"other-{turn}", expected[97].prompt, sampling=Sampling(max_tokens=5)))
        harness.run()
        for name, tokens in alone.items():
            assert harness.tokens(f"{name}-{turn}") == tokens, (name, turn)


def test_preempted(model: LoadedModel, alone: dict[str, list[int]], expected: dict[int, Expected]) -> None:
    harness = Harness(model, num_blocks=7)
    harness.send(*(sequence(n, expected[33].prompt, sampling=s, named=False) for n, s in SAMPLINGS.items()))
    harness.run()
    assert harness.engine.stats().preemptions
    for name, tokens in alone.items():
        assert harness.tokens(name) == tokens, name


def test_moved(model: LoadedModel, alone: dict[str, list[int]], expected: dict[int, Expected]) -> None:
    writer, reader = Harness(model, num_blocks=8), Harness(model, num_blocks=8)
    message = sequence("a", expected[33].prompt, sampling=SAMPLINGS["nucleus"])
    writer.send(sequence("a", expected[33].prompt, sampling=SAMPLINGS["nucleus"], hand_off=True))
    reader.send(ReserveSequence(sequence=message))
    writer.run()
    reader.run()
    target = reader.of(Reserved)[0].block_ids
    source = writer.scheduler.roster.sequences["a"].block_ids
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in zip(source, target, strict=True):
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)
    reader.send(StartSequence(seq_id="a", first_tokens=((0, writer.tokens("a")[0]),)))
    reader.run()
    assert reader.tokens("a") == alone["nucleus"]
