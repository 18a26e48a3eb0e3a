"""A tiny model in float32: the same tokens for every chunk size, cold and cached, mixed and moved, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.engine.loader import LoadedModel, load_model
from services.engine.messages import ReleaseSequence, Reserved, ReserveSequence, Sampling, StartSequence
from tests.engine_harness import Harness, sequence
from tests.golden.oracle import generate

NUM_TOKENS = 16
CHUNKS = (1, 7, 16, 64, 97, 512)
GREEDY = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


PROMPT = ids(97, 1)


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> LoadedModel:
    return load_model(tiny_model_folder, dtype="float32")


@pytest.fixture(scope="module")
def expected(tiny_model_folder: Path) -> list[int]:
    (found,) = generate(tiny_model_folder, [PROMPT], NUM_TOKENS)
    return found.tokens


def warm(harness: Harness, prompt: Sequence[int], num_blocks: int) -> None:
    if num_blocks:
        harness.send(sequence("before", prompt[: num_blocks * 16], sampling=Sampling(max_tokens=1)))
        harness.run()


@pytest.mark.parametrize("cached_blocks", [0, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_size_gives_the_same_tokens(
    chunk: int, cached_blocks: int, tiny: LoadedModel, expected: list[int]
) -> None:
    harness = Harness(tiny, num_blocks=32, max_num_batched_tokens=chunk)
    warm(harness, PROMPT, cached_blocks)
    harness.send(sequence("a", PROMPT, sampling=GREEDY))
    harness.run()
    assert harness.tokens("a") == expected
    assert harness.end("a").cached_tokens == cached_blocks * 16


@pytest.mark.parametrize("cached_blocks", [0, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_size_of_the_writer_gives_the_same_tokens_on_the_reader(
    chunk: int, cached_blocks: int, tiny: LoadedModel, expected: list[int]
) -> None:
    writer = Harness(tiny, num_blocks=32, max_num_batched_tokens=chunk)
    reader = Harness(tiny, num_blocks=32)
    warm(writer, PROMPT, cached_blocks)
    writer.send(sequence("a", PROMPT, sampling=GREEDY, hand_off=True))
    writer.run()
    reader.send(ReserveSequence(sequence=sequence("a", PROMPT, sampling=GREEDY)))
    reader.run()
    (grant,) = reader.of(Reserved)
    source = writer.scheduler.roster.sequences["a"].block_ids
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in zip(source, grant.block_ids, strict=True):
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)
    reader.send(StartSequence(seq_id="a", first_tokens=((0, writer.tokens("a")[0]),)))
    writer.send(ReleaseSequence(seq_id="a"))
    reader.run()
    assert reader.tokens("a") == expected
    assert reader.engine.tally.prompt_tokens_computed == 0


@pytest.mark.parametrize("hand_off", [False, True])
def test_short_prompts_do_not_wait_for_a_long_one(hand_off: bool, tiny: LoadedModel) -> None:
    """A long prompt in chunks of 64, and short ones behind it: all of them answer within a quarter of its steps."""
    harness = Harness(tiny, num_blocks=256, max_num_batched_tokens=64)
    harness.send(sequence("long", ids(900, 2), sampling=Sampling(max_tokens=2), hand_off=hand_off))
    harness.step()
    for i in range(5):
        harness.send(sequence(f"short-{i}", ids(10, 3 + i), sampling=Sampling(max_tokens=2), hand_off=hand_off))
    answered: dict[str, int] = {}
    for number in range(2, 100):
        harness.step()
        for output in harness.outputs():
            answered.setdefault(output.seq_id, number)
        if "long" in answered:
            break
    shorts = [step - 1 for seq_id, step in answered.items() if seq_id != "long"]
    assert len(shorts) == 5
    assert max(shorts) <= answered["long"] / 4


def test_four_requests_that_grow_to_half_the_pool_each_give_the_tokens_they_give_alone(tiny: LoadedModel) -> None:
    prompts = [ids(64, 30 + i) for i in range(4)]
    grown = Sampling(max_tokens=128, ignore_eos=True)
    alone = []
    for prompt in prompts:
        harness = Harness(tiny, num_blocks=24)
        harness.send(sequence("a", prompt, sampling=grown))
        harness.run()
        alone.append(harness.tokens("a"))
    crowded = Harness(tiny, num_blocks=24)
    for i, prompt in enumerate(prompts):
        crowded.send(sequence(str(i), prompt, sampling=grown))
    crowded.run()
    assert [crowded.tokens(str(i)) for i in range(4)] == alone
    stats = crowded.engine.stats()
    assert 1 <= stats.preemptions <= (4 * 8 + 4) * 4
    assert stats.prompt_tokens_cached == 0
    assert stats.tokens_recomputed > 0
