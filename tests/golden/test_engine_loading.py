"""Blocks that a peer writes into the engine's memory: used when they are right, computed when they are not there."""

from __future__ import annotations

import pytest

from services.engine.loader import LoadedModel
from services.engine.messages import (
    AbortSequence,
    Loaded,
    LoadEnded,
    LoadWanted,
    PrefillStarted,
    ReleaseSequence,
    Sampling,
    Unquarantine,
)
from services.engine.sequence import Phase
from tests.engine_harness import Harness, sequence

SIZE = 16
PROMPT = [(7 * i) % 400 + 100 for i in range(70)]  # 4 full blocks and 6 tokens
GREEDY = Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def holder(tiny: LoadedModel) -> Harness:
    """A worker that has computed the prompt, and still holds its blocks."""
    harness = Harness(tiny, num_blocks=32)
    harness.send(sequence("a", PROMPT, sampling=GREEDY, hand_off=True))
    harness.run()
    return harness


@pytest.fixture(scope="module")
def answer(tiny: LoadedModel) -> list[int]:
    harness = Harness(tiny, num_blocks=32)
    harness.send(sequence("a", PROMPT, sampling=GREEDY))
    harness.run()
    return harness.tokens("a")


def asking(tiny: LoadedModel, *, offered: int, hand_off: bool = False) -> tuple[Harness, LoadWanted]:
    """A worker that was just told that a peer offers so many blocks, and what it wants of them."""
    harness = Harness(tiny, num_blocks=32)
    harness.send(sequence("b", PROMPT, sampling=GREEDY, offered_blocks=offered, hand_off=hand_off))
    harness.run()
    (wanted,) = harness.of(LoadWanted)
    return harness, wanted


def write(holder: Harness, harness: Harness, wanted: LoadWanted, count: int) -> None:
    """What the peer does: fill the first blocks that are wanted."""
    source = holder.scheduler.roster.sequences["a"].block_ids
    group = harness.memory.geometry.groups[0]
    for i in range(wanted.first, wanted.first + count):
        for layer in range(group.num_layers):
            harness.memory.block(0, layer, wanted.block_ids[i])[:] = holder.memory.block(0, layer, source[i])


def test_nothing_is_computed_before_the_answer_and_the_rest_after_it(
    tiny: LoadedModel, holder: Harness, answer: list[int]
) -> None:
    harness, wanted = asking(tiny, offered=4)
    assert (wanted.first, wanted.count, len(wanted.block_ids)) == (0, 4, 5)
    assert harness.engine.tally.tokens_forwarded == 0
    assert harness.engine.stats().blocks_reserved == 5
    assert harness.engine.patience_s is None  # the answer is a message
    write(holder, harness, wanted, 4)
    harness.send(Loaded(seq_id="b", count=4))
    harness.run()
    assert harness.tokens("b") == answer
    assert harness.engine.tally.prompt_tokens_computed == len(PROMPT) - 4 * SIZE
    assert harness.end("b").cached_tokens == 4 * SIZE
    assert dict(harness.engine.stats().cached_by_source) == {"device": 0, "peer": 4 * SIZE}
    (ended,) = harness.of(LoadEnded)
    assert (ended.source, ended.wanted, ended.count) == ("peer", 4, 4)


@pytest.mark.parametrize("count", [0, 2])
def test_what_did_not_come_is_computed(tiny: LoadedModel, holder: Harness, answer: list[int], count: int) -> None:
    harness, wanted = asking(tiny, offered=4)
    write(holder, harness, wanted, count)
    harness.send(Loaded(seq_id="b", count=count))
    harness.run()
    assert harness.tokens("b") == answer
    assert harness.end("b").cached_tokens == count * SIZE
    assert harness.engine.tally.prompt_tokens_computed == len(PROMPT) - count * SIZE
    assert harness.engine.stats().loads_failed == 1


def test_a_write_that_may_still_land_costs_its_blocks_and_not_the_answer(
    tiny: LoadedModel, holder: Harness, answer: list[int]
) -> None:
    harness, wanted = asking(tiny, offered=4)
    harness.send(Loaded(seq_id="b", count=4, quarantine=True))
    harness.run()
    write(holder, harness, wanted, 4)  # late, as quarantine expects
    assert harness.tokens("b") == answer
    assert harness.end("b").cached_tokens == 0
    stats = harness.engine.stats()
    assert (stats.blocks_quarantined, stats.blocks_used) == (5, 0)
    harness.send(Unquarantine(seq_id="b"))
    assert harness.engine.stats().blocks_quarantined == 0


def test_two_quarantines_of_one_sequence_end_with_two_fences(tiny: LoadedModel) -> None:
    harness, _ = asking(tiny, offered=4, hand_off=True)
    harness.send(Loaded(seq_id="b", count=0, quarantine=True))
    harness.run()
    harness.send(AbortSequence(seq_id="b", quarantine=True))  # its hand-off was on the wire too
    harness.run()
    assert harness.engine.stats().blocks_quarantined == 10
    harness.send(Unquarantine(seq_id="b"))
    assert harness.engine.stats().blocks_quarantined == 10
    harness.send(Unquarantine(seq_id="b"))
    assert harness.engine.stats().blocks_quarantined == 0


@pytest.mark.parametrize("quarantine", [False, True])
def test_an_abort_while_loading_lets_the_blocks_go(tiny: LoadedModel, quarantine: bool) -> None:
    harness, _ = asking(tiny, offered=4)
    harness.send(AbortSequence(seq_id="b", quarantine=quarantine))
    harness.send(Loaded(seq_id="b", count=4))  # crossed the abort
    harness.run()
    assert harness.end("b").finish_reason == "abort"
    stats = harness.engine.stats()
    assert (stats.blocks_quarantined, stats.blocks_used, stats.blocks_reserved) == (5 * quarantine, 0, 0)
    if quarantine:
        harness.send(Unquarantine(seq_id="b"))
    assert harness.engine.stats().blocks_free == 32


def test_a_hand_off_announces_its_first_chunk_after_the_load(tiny: LoadedModel, holder: Harness) -> None:
    harness, wanted = asking(tiny, offered=4, hand_off=True)
    assert harness.of(PrefillStarted) == []
    write(holder, harness, wanted, 4)
    harness.send(Loaded(seq_id="b", count=4))
    harness.run()
    (started,) = harness.of(PrefillStarted)
    assert (started.cached_blocks, started.block_ids) == (4, wanted.block_ids)
    harness.send(ReleaseSequence(seq_id="b"))
    assert harness.engine.stats().blocks_cached == 4


def test_others_go_on_while_one_loads_and_equal_prompts_wait_for_it(
    tiny: LoadedModel, holder: Harness, answer: list[int]
) -> None:
    harness, wanted = asking(tiny, offered=4)
    harness.send(sequence("c", PROMPT[::-1], sampling=GREEDY), sequence("d", PROMPT, sampling=GREEDY))
    harness.run()
    assert len(harness.tokens("c")) == GREEDY.max_tokens
    assert harness.tokens("d") == []
    write(holder, harness, wanted, 4)
    harness.send(Loaded(seq_id="b", count=4))
    harness.run()
    assert harness.tokens("b") == harness.tokens("d") == answer
    assert harness.end("d").cached_tokens == 4 * SIZE
    assert dict(harness.engine.stats().cached_by_source) == {"device": 4 * SIZE, "peer": 4 * SIZE}


def test_a_preempted_sequence_does_not_ask_its_peer_again(tiny: LoadedModel, holder: Harness) -> None:
    harness, wanted = asking(tiny, offered=4)
    write(holder, harness, wanted, 4)
    harness.send(Loaded(seq_id="b", count=4))
    harness.step()
    seq = harness.scheduler.roster.sequences["b"]
    assert seq.phase is Phase.RUNNING
    harness.scheduler.roster.preempt(seq)
    harness.run()
    assert len(harness.of(LoadWanted)) == 1
    assert len(harness.tokens("b")) == GREEDY.max_tokens


def test_an_offer_of_what_is_here_already_asks_for_nothing(tiny: LoadedModel) -> None:
    harness = Harness(tiny, num_blocks=32)
    harness.send(sequence("a", PROMPT, sampling=GREEDY))
    harness.run()
    harness.send(sequence("b", PROMPT, sampling=GREEDY, offered_blocks=3))
    harness.run()
    assert harness.of(LoadWanted) == []
    assert harness.tokens("a") == harness.tokens("b")
