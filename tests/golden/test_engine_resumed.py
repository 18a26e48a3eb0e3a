"""Sequences that go on elsewhere: outputs come along, none is drawn again, and all that is a function of them stays."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.blocks import block_names
from services.engine.loader import LoadedModel, load_model
from services.engine.messages import (
    AbortSequence,
    Penalties,
    ReleaseSequence,
    Reserved,
    ReserveSequence,
    Sampling,
    SequenceOutput,
    StartSequence,
)
from services.protocol.grammar import GrammarSpec
from tests.engine_harness import ROOT, Harness, sequence

TOKENS = 40
CUTS = (1, 8, 15, 16, 31, 39)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}'
STOPS = tuple(range(3, 200))
SAMPLINGS = {
    "greedy": Sampling(max_tokens=TOKENS, ignore_eos=True),
    "seeded": Sampling(temperature=1.0, seed=5, max_tokens=TOKENS, ignore_eos=True, top_p=0.9, min_p=0.01),
    "penalties": Sampling(
        temperature=1.0,
        seed=6,
        max_tokens=TOKENS,
        ignore_eos=True,
        penalties=Penalties(presence=0.7, frequency=0.5, repetition=1.4),
        logit_bias=((7, 2.0), (9, -3.0)),
    ),
    "min_tokens": Sampling(temperature=1.0, seed=7, max_tokens=TOKENS, min_tokens=35, stop_token_ids=STOPS),
    "logprobs": Sampling(temperature=1.0, seed=8, max_tokens=TOKENS, ignore_eos=True, logprobs=3),
    "grammar": Sampling(
        temperature=1.0, seed=9, max_tokens=TOKENS, grammar=GrammarSpec(kind="json_schema", text=SCHEMA)
    ),
}


@pytest.fixture(scope="module")
def tiny(invariant_model_folder: Path) -> LoadedModel:
    return load_model(invariant_model_folder, dtype="float32")


def prompt_of(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(3, 512) for _ in range(length)]


def of(harness: Harness, seq_id: str) -> list[SequenceOutput]:
    return [o for o in harness.outputs() if o.seq_id == seq_id and (o.token_ids or o.finish_reason)]


def run_alone(model: LoadedModel, message: Any, **options: Any) -> list[SequenceOutput]:
    harness = Harness(model, num_blocks=64, **options)
    harness.send(message)
    harness.run()
    return of(harness, message.seq_id)


def run_apart(writer: Harness, reader: Harness, seq_id: str, prompt: list[int], **fields: Any) -> None:
    """Computed by one engine, decoded by another."""
    writer.send(sequence(seq_id, prompt, hand_off=True, **fields))
    reader.send(ReserveSequence(sequence=sequence(seq_id, prompt, **fields)))
    writer.run()
    reader.run()
    grant = next(g for g in reader.of(Reserved) if g.seq_id == seq_id)
    source = writer.scheduler.roster.sequences[seq_id].block_ids
    assert len(source) == len(grant.block_ids)
    for layer in range(writer.memory.geometry.groups[0].num_layers):
        for ours, theirs in list(zip(source, grant.block_ids, strict=True))[grant.cached_blocks :]:
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)
    writer.send(ReleaseSequence(seq_id=seq_id))
    firsts = [o for o in of(writer, seq_id) if not o.finish_reason]
    reader.send(
        StartSequence(
            seq_id=seq_id,
            first_tokens=tuple((o.choice, o.token_ids[0]) for o in firsts),
            first_logprobs=tuple((o.choice, told) for o in firsts for told in o.logprobs),
        )
    )
    reader.run()
    assert reader.engine.stats().prompt_tokens_computed == 0


def same(found: list[SequenceOutput], whole: list[SequenceOutput], cut: int) -> None:
    """What came behind the cut is what the undisturbed answer has there, with positions, logprobs and the end."""
    expected = whole[cut:]
    assert [(o.position, o.token_ids, o.finish_reason) for o in found] == [
        (o.position, o.token_ids, o.finish_reason) for o in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (a.rank, a.top_ids) == (b.rank, b.top_ids)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_as_if_nothing_had_happened(tiny: LoadedModel, name: str) -> None:
    prompt, sampling = prompt_of(21), SAMPLINGS[name]
    whole = run_alone(tiny, sequence("whole", prompt, sampling=sampling))
    ids = [t for o in whole for t in o.token_ids]
    writer, reader = Harness(tiny, num_blocks=64, max_num_batched_tokens=13), Harness(tiny, num_blocks=64)
    for cut in [c for c in CUTS if c < len(ids)]:
        given = {"sampling": sampling, "output_ids": tuple(ids[:cut])}
        same(run_alone(tiny, sequence("alone", prompt, **given)), whole, cut)
        run_apart(writer, reader, f"apart-{cut}", prompt, **given)
        same(of(writer, f"apart-{cut}"), whole[: cut + 1], cut)
        is_over = cut + 1 == len(ids)  # with the token that the writer draws
        same([] if is_over else of(reader, f"apart-{cut}"), whole, len(ids) if is_over else cut)
    assert reader.engine.stats().tokens_recomputed == 0
    assert writer.engine.stats().decode_tokens_forwarded == 0
    assert writer.pool.counts().used == reader.pool.counts().used == 0


def test_blocks_of_prompt_and_outputs_have_their_names_on_both_sides_and_are_found(tiny: LoadedModel) -> None:
    prompt, sampling = prompt_of(21), SAMPLINGS["seeded"]
    ids = [t for o in run_alone(tiny, sequence("whole", prompt, sampling=sampling)) for t in o.token_ids]
    names = block_names([*prompt, *ids], 16, ROOT)
    writer, reader = Harness(tiny, num_blocks=64), Harness(tiny, num_blocks=64)
    run_apart(writer, reader, "moved", prompt, sampling=sampling, output_ids=tuple(ids[:30]))
    assert writer.pool.lookup(names, len(names), 0) == 51 // 16
    assert reader.pool.lookup(names, len(names), 0) == (21 + TOKENS - 1) // 16 == len(names)
    before = reader.engine.tally
    reader.send(sequence("again", prompt, sampling=sampling, output_ids=tuple(ids[:35])))
    reader.run()
    assert reader.tokens("again") == ids[35:]
    tally = reader.engine.tally
    assert tally.prompt_tokens_computed == before.prompt_tokens_computed
    assert tally.tokens_recomputed - before.tokens_recomputed == 56 - 48  # three blocks were found
    assert reader.end("again").cached_tokens == 21
    run_apart(writer, reader, "hit", prompt, sampling=sampling, output_ids=tuple(ids[:35]))
    grant = next(g for g in reader.of(Reserved) if g.seq_id == "hit")
    assert grant.cached_blocks == 3


# --- several choices ---

N = 4
SEEDED = Sampling(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
GIVEN = {0: 3, 1: 17, 3: 1}  # outputs by choice; choice 2 is over


@pytest.fixture(scope="module")
def together(tiny: LoadedModel) -> dict[int, dict[int, list[int]]]:
    """Four seeded choices of one prompt, undisturbed, by prompt length."""
    found = {}
    for length in (15, 16, 17, 33):
        outputs = run_alone(tiny, sequence("a", prompt_of(length), sampling=SEEDED, n=N))
        found[length] = {i: [t for o in outputs if o.choice == i for t in o.token_ids] for i in range(N)}
    return found


def brought(whole: dict[int, list[int]], given: dict[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((choice, tuple(whole[choice][:count])) for choice, count in given.items())


def check_choices(outputs: list[SequenceOutput], whole: dict[int, list[int]], given: dict[int, int]) -> None:
    """Each choice goes on behind what it brought along; its first token may be told once more."""
    for choice, count in given.items():
        mine = [o for o in outputs if o.choice == choice]
        if mine[0].position == 0 and count:
            assert mine.pop(0).token_ids == (whole[choice][0],)
        assert [o.position for o in mine] == list(range(count, len(whole[choice])))
        assert [t for o in mine for t in o.token_ids] == whole[choice][count:]
        assert mine[-1].finish_reason == "length"
    assert {o.choice for o in outputs} == set(given)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize(
    ("num_blocks", "named"), [(64, True), (64, False), (6, True), (6, False)], ids=["room", "nameless", "tight", "both"]
)
def test_choices_part_behind_the_prompt_each_with_its_own_outputs(
    tiny: LoadedModel, together: dict[int, dict[int, list[int]]], length: int, num_blocks: int, named: bool
) -> None:
    whole, prompt = together[length], prompt_of(length)
    fields: dict[str, Any] = {"sampling": SEEDED, "n": N, "named": named, "outputs": brought(whole, GIVEN)}
    alone = Harness(tiny, num_blocks=num_blocks)
    alone.send(sequence("a", prompt, **fields))
    alone.run()
    check_choices(of(alone, "a"), whole, GIVEN)
    assert alone.engine.stats().prompt_tokens_computed == length
    assert alone.engine.stats().tokens_recomputed >= sum(GIVEN.values()) - 1  # one of one token is no recomputing
    writer, reader = Harness(tiny, num_blocks=8), Harness(tiny, num_blocks=num_blocks)
    run_apart(writer, reader, "a", prompt, **fields)
    check_choices(of(writer, "a") + of(reader, "a")[len(GIVEN) :], whole, GIVEN)
    assert writer.engine.stats().prompt_tokens_computed == length
    assert reader.pool.counts().used == writer.pool.counts().used == 0


@pytest.mark.parametrize("choice", range(N))
def test_one_choice_that_is_left_moves_with_its_outputs(
    tiny: LoadedModel, together: dict[int, dict[int, list[int]]], choice: int
) -> None:
    whole, given = together[17], {choice: 9}
    writer, reader = Harness(tiny, num_blocks=8), Harness(tiny, num_blocks=8)
    run_apart(writer, reader, "a", prompt_of(17), sampling=SEEDED, n=N, outputs=brought(whole, given))
    check_choices(of(reader, "a"), whole, given)
    assert reader.engine.stats().tokens_recomputed == 0


def test_choices_that_part_may_be_dropped_or_aborted_at_any_step(
    tiny: LoadedModel, together: dict[int, dict[int, list[int]]]
) -> None:
    whole = together[17]
    for steps in range(6):
        for dropped in (0, 1, None):
            harness = Harness(tiny, num_blocks=7)
            harness.send(sequence("a", prompt_of(17), sampling=SEEDED, n=N, outputs=brought(whole, GIVEN)))
            for _ in range(steps):
                harness.step()
            harness.send(AbortSequence(seq_id="a", choice=dropped))
            harness.run()
            if dropped is not None:
                left = {c: k for c, k in GIVEN.items() if c != dropped}
                check_choices([o for o in of(harness, "a") if o.choice != dropped], whole, left)
            assert harness.pool.counts().used == 0
            assert not harness.scheduler.roster.sequences


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"n": 2, "outputs": ((0, (5,)), (0, (6,)))}, r"choices \[0, 0\] came along, there are 2"),
        ({"n": 2, "outputs": ((2, (5,)),)}, r"choices \[2\] came along"),
        ({"n": 2, "outputs": ((0, (5,)),), "output_ids": (5,)}, "came along for 2 choices"),
        ({"n": 2, "outputs": ((0, (512,)),)}, "outside the vocabulary"),
        ({"n": 2, "outputs": ((0, (5,) * 16),)}, "max_tokens is 16"),
    ],
)
def test_what_cannot_be_is_refused(tiny: LoadedModel, fields: dict[str, Any], match: str) -> None:
    harness = Harness(tiny, num_blocks=8)
    harness.send(sequence("a", [5, 6, 7], **fields))
    harness.run()
    (output,) = of(harness, "a")
    assert output.finish_reason == "error"
    assert re.search(match, output.error)
