"""In float32 the engine's greedy text is transformers', whatever the chunks, the company, the cache or the blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from services.engine.loader import LoadedModel
from services.engine.messages import ReleaseSequence, Reserved, ReserveSequence, Sampling, StartSequence
from tests.engine_harness import Harness, sequence, shuffle_pool
from tests.golden.conftest import NUM_TOKENS
from tests.golden.oracle import Expected, generate, license_prompts

GREEDY = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)


def run_all(harness: Harness, expected: Iterable[Expected], what: str) -> None:
    """All prompts at once; each must give its text."""
    items = list(expected)
    for i, item in enumerate(items):
        harness.send(sequence(f"{what}-{i}", item.prompt, sampling=GREEDY))
    harness.run()
    for i, item in enumerate(items):
        item.check(harness.tokens(f"{what}-{i}"), what)
        assert len(harness.tokens(f"{what}-{i}")) == NUM_TOKENS


@pytest.mark.parametrize(("chunk", "lengths"), [(7, (15, 16, 33, 97)), (512, (200, 700))])
def test_any_chunk_size_gives_the_same_text(
    chunk: int, lengths: tuple[int, ...], model: LoadedModel, expected: dict[int, Expected]
) -> None:
    harness = Harness(model, max_num_batched_tokens=chunk)
    run_all(harness, [expected[n] for n in lengths], f"chunks of {chunk}")
    assert harness.engine.tally.prompt_tokens_computed == sum(lengths)


def test_a_cached_prefix_gives_the_same_text(model: LoadedModel, expected: dict[int, Expected]) -> None:
    harness = Harness(model, max_num_batched_tokens=64)
    chosen = [e for n, e in expected.items() if n <= 200]
    run_all(harness, chosen, "cold")
    computed = harness.engine.tally.prompt_tokens_computed
    assert computed == sum(len(e.prompt) for e in chosen)
    run_all(harness, chosen, "cached")
    hits = sum((len(e.prompt) - 1) // 16 * 16 for e in chosen)
    assert harness.engine.tally.prompt_tokens_computed == 2 * computed - hits
    assert harness.scheduler.roster.prompt_tokens_cached == hits


def test_one_token_at_a_time_gives_the_same_text(model: LoadedModel, expected: dict[int, Expected]) -> None:
    run_all(Harness(model, max_num_batched_tokens=1), [expected[17]], "chunks of 1")


def test_shuffled_blocks_give_the_same_text(model: LoadedModel, expected: dict[int, Expected]) -> None:
    harness = Harness(model, max_num_batched_tokens=64)
    shuffle_pool(harness)
    for n in (33, 97):
        harness.send(sequence(str(n), expected[n].prompt, sampling=GREEDY))
    harness.step()
    tables = [s.block_ids for s in harness.scheduler.roster.running.values()]
    assert any(b != a + 1 for table in tables for a, b in itertools.pairwise(table))
    harness.run()
    for n in (33, 97):
        expected[n].check(harness.tokens(str(n)), "shuffled")


@pytest.mark.parametrize("block_size", [1, 64])
def test_any_block_size_gives_the_same_text(block_size: int, model: LoadedModel, expected: dict[int, Expected]) -> None:
    harness = Harness(model, block_size=block_size, num_blocks=2048 // block_size, max_num_batched_tokens=40)
    for n in (17, 33):
        harness.send(sequence(str(n), expected[n].prompt, sampling=GREEDY, block_size=block_size))
    harness.run()
    for n in (17, 33):
        expected[n].check(harness.tokens(str(n)), f"blocks of {block_size}")


def test_preempted_requests_give_the_same_text_and_count_no_hits(
    model: LoadedModel, expected: dict[int, Expected]
) -> None:
    harness = Harness(model, num_blocks=11, max_num_batched_tokens=64)
    chosen = [expected[n] for n in (97, 33, 17, 16)]
    run_all(harness, chosen, "preempted")
    stats = harness.engine.stats()
    assert stats.preemptions >= 1
    assert stats.tokens_recomputed >= 1
    assert stats.prompt_tokens_cached == 0
    assert stats.prompt_tokens_computed == 97 + 33 + 17 + 16
    assert stats.decode_tokens_forwarded == 4 * (NUM_TOKENS - 1)


@pytest.mark.parametrize("known_blocks", [0, 2])
def test_kv_that_moves_to_a_decode_worker_continues_the_same_text(
    known_blocks: int, model: LoadedModel, expected: dict[int, Expected]
) -> None:
    item = expected[33]
    writer = Harness(model, num_blocks=40, max_num_batched_tokens=20)
    reader = Harness(model, num_blocks=40)
    if known_blocks:
        reader.send(sequence("before", item.prompt[: known_blocks * 16], sampling=Sampling(max_tokens=1)))
        reader.run()
    before = reader.engine.tally
    writer.send(sequence("a", item.prompt, sampling=GREEDY, hand_off=True))
    writer.run()
    reader.send(ReserveSequence(sequence=sequence("a", item.prompt, sampling=GREEDY)))
    reader.run()
    (grant,) = reader.of(Reserved)
    assert grant.cached_blocks == known_blocks
    move(writer, reader, grant.block_ids, known_blocks)
    writer.send(ReleaseSequence(seq_id="a"))
    reader.send(StartSequence(seq_id="a", first_tokens=((0, writer.tokens("a")[0]),)))
    reader.run()
    item.check(reader.tokens("a"), "moved")
    assert len(reader.tokens("a")) == NUM_TOKENS
    assert reader.engine.tally.prompt_tokens_computed == before.prompt_tokens_computed
    assert writer.scheduler.roster.pool.counts().used == 0


def move(writer: Harness, reader: Harness, target: tuple[int, ...], skip: int) -> None:
    source = writer.scheduler.roster.sequences["a"].block_ids
    assert len(source) == len(target)
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in list(zip(source, target, strict=True))[skip:]:
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)


def test_a_request_that_moved_mid_answer_continues_the_same_text(
    model: LoadedModel, expected: dict[int, Expected]
) -> None:
    item = expected[33]
    harness = Harness(model, num_blocks=40)
    for cut in (15, 31):
        name = f"cut-{cut}"
        harness.send(sequence(name, item.prompt, output_ids=tuple(item.tokens[:cut]), sampling=GREEDY))
        harness.run()
        assert harness.tokens(name) == item.tokens[cut:], name
        assert harness.outputs()[-1].position == NUM_TOKENS - 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixty_four_prompts_give_the_same_text(model: LoadedModel, default_model_folder: Path) -> None:
    lengths = [*range(1, 34), *range(47, 50), *range(63, 66), *range(95, 98), 113, 128, 129, 160, 200, 255, 256, 257]
    lengths += [300, 383, 400, 500, 511, 512, 513, 640, 700, 800, 1000, 1023, 1024, 1500]
    prompts = license_prompts(default_model_folder, lengths)
    assert len(prompts) == 64
    expected = generate(default_model_folder, prompts, NUM_TOKENS)
    harness = Harness(model, num_blocks=400, max_num_batched_tokens=300, max_num_seqs=16)
    run_all(harness, expected, "sixty-four")
    harness = Harness(model, num_blocks=100, max_num_batched_tokens=90, max_num_seqs=16)
    run_all(harness, expected, "sixty-four, tight")
