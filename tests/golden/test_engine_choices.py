"""Several choices share a prompt: it is computed once, its blocks are held once, and no choice sees another's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.engine.loader import LoadedModel, load_model
from services.engine.messages import (
    AbortSequence,
    Reserved,
    ReserveSequence,
    Sampling,
    SequenceOutput,
    StartSequence,
)
from tests.engine_harness import Harness, sequence
from tests.golden.oracle import Expected

N = 4
SEEDED = Sampling(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
GREEDY = Sampling(max_tokens=24, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 33, 97, 200)


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> LoadedModel:
    return load_model(tiny_model_folder, dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    """By length."""
    source = random.Random(1)
    return {length: [source.randrange(3, 512) for _ in range(length)] for length in LENGTHS}


def answers(harness: Harness, seq_id: str) -> dict[int, list[int]]:
    """Tokens of each choice so far; checks that positions follow one another."""
    found: dict[int, list[int]] = {}
    for output in harness.outputs():
        if output.seq_id == seq_id and output.token_ids:
            tokens = found.setdefault(output.choice, [])
            assert output.position == len(tokens)
            tokens += output.token_ids
    return found


def ends(harness: Harness, seq_id: str) -> dict[int, str]:
    return {o.choice: o.finish_reason for o in harness.outputs() if o.seq_id == seq_id and o.finish_reason}


@pytest.fixture(scope="module")
def together(tiny: LoadedModel, prompts: dict[int, list[int]]) -> dict[int, dict[int, list[int]]]:
    """Four seeded choices on a fresh engine with room, by prompt length."""
    found = {}
    for length in (15, 16, 17):
        harness = Harness(tiny, num_blocks=64)
        harness.send(sequence("a", prompts[length], sampling=SEEDED, n=N))
        harness.run()
        found[length] = answers(harness, "a")
        assert ends(harness, "a") == dict.fromkeys(range(N), "length")
        counts = harness.pool.counts()
        assert counts.used == 0
    return found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_greedy_choices_are_the_answer_of_one(tiny: LoadedModel, prompts: dict[int, list[int]], length: int) -> None:
    alone = Harness(tiny, num_blocks=64)
    alone.send(sequence("one", prompts[length], sampling=GREEDY))
    alone.run()
    harness = Harness(tiny, num_blocks=64)
    harness.send(sequence("a", prompts[length], sampling=GREEDY, n=N))
    harness.run()
    assert answers(harness, "a") == dict.fromkeys(range(N), alone.tokens("one"))
    stats = harness.engine.stats()
    assert stats.prompt_tokens_computed == length
    assert stats.decode_tokens_forwarded == N * 23
    assert stats.tokens_recomputed == 0


def test_greedy_choices_of_the_default_model_are_transformers_answer(
    model: LoadedModel, expected: dict[int, Expected]
) -> None:
    harness = Harness(model, num_blocks=16)
    harness.send(sequence("a", expected[17].prompt, sampling=Sampling(max_tokens=8, ignore_eos=True), n=3))
    harness.run()
    assert answers(harness, "a") == dict.fromkeys(range(3), expected[17].tokens[:8])


def test_choices_are_drawn_by_themselves(together: dict[int, dict[int, list[int]]]) -> None:
    for length, found in together.items():
        assert sorted(found) == list(range(N))
        assert len({tuple(tokens) for tokens in found.values()}) == N, length


def test_the_first_choice_is_the_one_answer_of_a_request_for_one(
    tiny: LoadedModel, prompts: dict[int, list[int]], together: dict[int, dict[int, list[int]]]
) -> None:
    harness = Harness(tiny, num_blocks=64)
    harness.send(sequence("a", prompts[16], sampling=SEEDED))
    harness.run()
    assert harness.tokens("a") == together[16][0]


@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize(
    ("num_blocks", "named"), [(9, True), (5, True), (5, False)], ids=["tight", "tightest", "without names"]
)
def test_a_pool_too_small_for_all_changes_no_token(
    tiny: LoadedModel,
    prompts: dict[int, list[int]],
    together: dict[int, dict[int, list[int]]],
    length: int,
    num_blocks: int,
    named: bool,
) -> None:
    harness = Harness(tiny, num_blocks=num_blocks)
    prompt = prompts[length]
    harness.send(*(sequence(i, prompt, sampling=SEEDED, n=N, named=named) for i in "ab"))
    harness.run()
    for i in "ab":
        assert answers(harness, i) == together[length]
    if num_blocks == 5:
        assert harness.engine.stats().tokens_recomputed
    assert harness.engine.stats().prompt_tokens_computed <= 2 * length


def test_in_chunks_in_company_and_cached(
    tiny: LoadedModel, prompts: dict[int, list[int]], together: dict[int, dict[int, list[int]]]
) -> None:
    harness = Harness(tiny, max_num_batched_tokens=7, max_num_seqs=3)
    for turn in ("cold", "cached"):
        for length in together:
            harness.send(sequence(f"{length}-{turn}", prompts[length], sampling=SEEDED, n=N))
        harness.send(sequence(f"other-{turn}", prompts[97], sampling=Sampling(max_tokens=5)))
        harness.run()
        for length, tokens in together.items():
            assert answers(harness, f"{length}-{turn}") == tokens, (length, turn)


def test_four_choices_need_fewer_blocks_than_two_requests(tiny: LoadedModel, prompts: dict[int, list[int]]) -> None:
    used = {}
    for n, ids in ((N, "a"), (1, "ab")):
        harness = Harness(tiny, num_blocks=64)
        harness.send(*(sequence(i, prompts[200], sampling=GREEDY, n=n, named=False) for i in ids))
        most = 0
        while harness.step():
            most = max(most, harness.pool.counts().used)
        used[n] = most
    assert used == {N: 12 + N * 2, 1: 2 * 14}


def test_a_choice_that_ends_with_its_first_token_leaves_the_others(
    tiny: LoadedModel, prompts: dict[int, list[int]], together: dict[int, dict[int, list[int]]]
) -> None:
    tokens = together[17]
    for ended in range(N):
        first = tokens[ended][0]
        over = {i for i in range(N) if tokens[i][0] == first}
        sampling = Sampling(temperature=1.0, seed=5, max_tokens=3, ignore_eos=True, stop_token_ids=(first,))
        harness = Harness(tiny, num_blocks=64)
        harness.send(sequence("a", prompts[17], sampling=sampling, n=N))
        harness.run()
        found = answers(harness, "a")
        assert {i for i, t in found.items() if len(t) == 1} == over
        assert all(t == tokens[i][: len(t)] for i, t in found.items())
        assert {i for i, reason in ends(harness, "a").items() if reason == "stop"} >= over


def test_one_choice_is_dropped_and_the_others_go_on(
    tiny: LoadedModel, prompts: dict[int, list[int]], together: dict[int, dict[int, list[int]]]
) -> None:
    for dropped in range(N):
        for steps in (0, 1, 5):
            harness = Harness(tiny, num_blocks=64)
            harness.send(sequence("a", prompts[17], sampling=SEEDED, n=N))
            for _ in range(steps):
                harness.step()
            harness.send(AbortSequence(seq_id="a", choice=dropped))
            harness.run()
            found = answers(harness, "a")
            assert len(found.pop(dropped, [])) == steps
            assert found == {i: t for i, t in together[17].items() if i != dropped}
            assert dropped not in ends(harness, "a")
            assert harness.pool.counts().used == 0


def test_an_abort_ends_all_choices(tiny: LoadedModel, prompts: dict[int, list[int]]) -> None:
    harness = Harness(tiny, num_blocks=64)
    harness.send(sequence("a", prompts[17], sampling=SEEDED, n=N))
    for _ in range(3):
        harness.step()
    harness.send(AbortSequence(seq_id="a"))
    harness.run()
    assert harness.end("a").finish_reason == "abort"
    assert not harness.scheduler.roster.sequences
    assert harness.pool.counts().used == 0


@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("num_blocks", [32, 5], ids=["room", "tight"])
def test_moved(
    tiny: LoadedModel,
    prompts: dict[int, list[int]],
    together: dict[int, dict[int, list[int]]],
    length: int,
    num_blocks: int,
) -> None:
    writer, reader = Harness(tiny, num_blocks=8), Harness(tiny, num_blocks=num_blocks)
    message = sequence("a", prompts[length], sampling=SEEDED, n=N)
    writer.send(sequence("a", prompts[length], sampling=SEEDED, n=N, hand_off=True))
    reader.send(ReserveSequence(sequence=message))
    writer.run()
    reader.run()
    first = answers(writer, "a")
    assert first == {i: t[:1] for i, t in together[length].items()}
    move(writer, reader)
    reader.send(StartSequence(seq_id="a", first_tokens=tuple((i, t[0]) for i, t in first.items())))
    reader.run()
    assert answers(reader, "a") == together[length]
    assert reader.engine.stats().prompt_tokens_computed == 0


def test_only_choices_that_go_on_are_moved(
    tiny: LoadedModel, prompts: dict[int, list[int]], together: dict[int, dict[int, list[int]]]
) -> None:
    writer, reader = Harness(tiny, num_blocks=8), Harness(tiny, num_blocks=16)
    writer.send(sequence("a", prompts[17], sampling=SEEDED, n=N, hand_off=True))
    reader.send(ReserveSequence(sequence=sequence("a", prompts[17], sampling=SEEDED, n=N)))
    writer.run()
    reader.run()
    move(writer, reader)
    reader.send(AbortSequence(seq_id="a", choice=3))
    reader.send(StartSequence(seq_id="a", first_tokens=tuple((i, together[17][i][0]) for i in (1, 2, 3))))
    reader.run()
    assert answers(reader, "a") == {i: together[17][i] for i in (1, 2)}
    assert reader.pool.counts().used == 0


def move(writer: Harness, reader: Harness) -> None:
    target = reader.of(Reserved)[0].block_ids
    source = writer.scheduler.roster.sequences["a"].block_ids
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in zip(source, target, strict=True):
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)


def test_more_choices_than_may_run_at_once_take_turns(tiny: LoadedModel, prompts: dict[int, list[int]]) -> None:
    harness = Harness(tiny, num_blocks=64, max_num_seqs=3)
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    harness.send(sequence("a", prompts[17], sampling=sampling, n=8))
    harness.run()
    assert ends(harness, "a") == dict.fromkeys(range(8), "length")


def failed(harness: Harness) -> list[SequenceOutput]:
    return [o for o in harness.outputs() if o.finish_reason == "error"]


@pytest.mark.parametrize(("n", "outputs", "match"), [(0, (), "at least 1"), (2, (5,), "came along for 2 choices")])
def test_what_cannot_be_is_refused(tiny: LoadedModel, n: int, outputs: tuple[int, ...], match: str) -> None:
    harness = Harness(tiny, num_blocks=8)
    harness.send(sequence("a", [5, 6, 7], n=n, output_ids=outputs))
    harness.run()
    (output,) = failed(harness)
    assert match in output.error
