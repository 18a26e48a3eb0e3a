"""A request whose numbers break ends alone, and nothing of it reaches whoever gets its blocks next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.loader import LoadedModel, load_model
from services.engine.messages import (
    AbortSequence,
    GetSteps,
    ReleaseSequence,
    ReserveSequence,
    Sampling,
    StartSequence,
    StepDone,
    Unquarantine,
)
from services.engine.runner import Runner
from tests.engine_harness import Harness, sequence

POISON = 77
PROMPTS = [[(i * 31 + n) % 400 + 100 for i in range(n)] for n in (5, 20, 37)]
GREEDY = Sampling(max_tokens=10, ignore_eos=True)


@pytest.fixture
def tiny(tiny_model_folder: Path) -> LoadedModel:
    return load_model(tiny_model_folder, dtype="float32")


@pytest.fixture
def poisoned(tiny: LoadedModel) -> LoadedModel:
    """Whoever reads token 77 computes NaN from there on."""
    with torch.no_grad():
        tiny.path.module.get_input_embeddings().weight[POISON] = float("nan")
    return tiny


def texts(harness: Harness) -> dict[str, list[int]]:
    return {str(i): harness.tokens(str(i)) for i in range(len(PROMPTS))}


@pytest.fixture
def undisturbed(tiny_model_folder: Path) -> dict[str, list[int]]:
    harness = Harness(load_model(tiny_model_folder, dtype="float32"), num_blocks=32, max_num_batched_tokens=16)
    for i, prompt in enumerate(PROMPTS):
        harness.send(sequence(str(i), prompt, sampling=GREEDY))
    harness.run()
    return texts(harness)


@pytest.mark.parametrize("place", [0, 20, 39])
def test_nan_ends_its_own_request_and_leaves_clean_blocks(
    place: int, poisoned: LoadedModel, undisturbed: dict[str, list[int]]
) -> None:
    harness = Harness(poisoned, num_blocks=14, max_num_batched_tokens=16)
    bad = [(i * 7) % 300 + 150 for i in range(40)]
    bad[place] = POISON
    harness.send(sequence("bad", bad, sampling=GREEDY))
    for i, prompt in enumerate(PROMPTS):
        harness.send(sequence(str(i), prompt, sampling=GREEDY))
    harness.run()
    end = harness.end("bad")
    assert (end.finish_reason, end.error_code) == ("error", "internal_error")
    assert not harness.tokens("bad")
    assert texts(harness) == undisturbed
    assert harness.engine.stats().blocks_used == 0
    memory = [harness.memory.layer(0, i) for i in range(2)]
    assert all(bool(torch.isfinite(layer).all()) for layer in memory)
    names = sequence("bad", bad).block_names
    assert harness.pool.lookup(names) <= place // 16  # no name for what was poisoned


def test_a_broken_hand_off_keeps_its_blocks_until_it_is_released(poisoned: LoadedModel) -> None:
    harness = Harness(poisoned, num_blocks=14)
    harness.send(sequence("bad", [5, POISON, 6], sampling=GREEDY, hand_off=True))
    harness.run()
    assert harness.end("bad").finish_reason == "error"
    assert harness.engine.stats().blocks_used == 1
    harness.send(ReleaseSequence(seq_id="bad", quarantine=True))
    harness.run()
    assert harness.engine.stats().blocks_quarantined == 1


def test_what_a_fence_freed_is_told_though_a_ping_came_with_it(tiny: LoadedModel) -> None:
    harness = Harness(tiny, num_blocks=14)
    harness.send(sequence("a", PROMPTS[1], sampling=GREEDY, hand_off=True))
    harness.run()
    harness.send(AbortSequence(seq_id="a", quarantine=True))
    harness.run()
    harness.send(Unquarantine(seq_id="a"), GetSteps(last=0))
    harness.run()
    told = [m.stats.blocks_quarantined for m in harness.sent if isinstance(m, StepDone)]
    assert told[-2:] == [2, 0]


def test_a_step_that_raises_is_tried_again_one_by_one(
    tiny: LoadedModel, undisturbed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny, num_blocks=32, max_num_batched_tokens=64)
    real = Runner._forward

    def out_of_memory(self: Runner, work: list, on_layer: object) -> object:
        if len(work) > 2 or any(w.sequence.seq_id == "bad" for w in work):
            raise RuntimeError("not enough memory for this batch")
        return real(self, work, on_layer)

    monkeypatch.setattr(Runner, "_forward", out_of_memory)
    harness.send(sequence("bad", [5, 6, 7], sampling=GREEDY))
    for i, prompt in enumerate(PROMPTS):
        harness.send(sequence(str(i), prompt, sampling=GREEDY))
    harness.run()
    assert "not enough memory" in harness.end("bad").error
    assert texts(harness) == undisturbed


def test_min_tokens_holds_the_end_back(tiny: LoadedModel) -> None:
    with torch.no_grad():
        tiny.path.module.get_output_embeddings().weight.zero_()  # all logits equal: the lowest id allowed wins
    harness = Harness(tiny, num_blocks=32)
    eos = tiny.card.eos_token_ids[0]
    sampling = Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(0, 1))
    harness.send(sequence("a", [5, 6], sampling=sampling))
    harness.run()
    assert eos == 2
    assert harness.tokens("a") == [3, 3, 3, 0]
    assert harness.end("a").finish_reason == "stop"


def test_a_decode_that_waits_for_reserved_blocks_is_told_as_paused_not_as_running(tiny: LoadedModel) -> None:
    harness = Harness(tiny, num_blocks=4)
    held = sequence("held", range(10, 42), named=False)  # 2 blocks, whose KV never comes
    mine = sequence("mine", range(10, 25), named=False, sampling=Sampling(max_tokens=40, ignore_eos=True))
    harness.send(ReserveSequence(sequence=mine), ReserveSequence(sequence=held))
    harness.run()
    harness.send(StartSequence(seq_id="mine", first_tokens=((0, 9),)))
    harness.run()
    told = harness.of(StepDone)
    assert told[-2].stats.running == 1  # of the last step that computed
    assert told[-1].stats.running == 0
    assert told[-1].stats.step == told[-2].stats.step
    assert told[-1].outputs == ()
    harness.send(AbortSequence(seq_id="held"))
    harness.run()
    assert harness.end("mine").finish_reason == "length"
