"""Pooled hidden states are transformers' own, however a prompt is cut, and whatever else the engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.engine.batch import Span
from services.engine.loader import LoadedModel, load_model
from services.engine.messages import AbortSequence, Sampling
from services.protocol.errors import ErrorCode
from tests.engine_harness import Harness, sequence, shuffle_pool
from tests.golden.oracle import license_prompts, mean_states
from tests.native_models import FAMILY, RUNNABLE, kernels, make_model

LENGTHS = (1, 2, 6, 7, 8, 15, 16, 17, 64, 65, 100, 150, 299, 300)
CHUNKS = (7, 64)
CLOSE = 2e-5
"""Of the norm; the model's own sums differ by as much with the order in which a matrix is multiplied."""


@pytest.fixture(scope="module")
def fused_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("fused"))


def vector(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4")


def pooled(harness: Harness, prompts: Sequence[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Of each prompt, all of them at once."""
    for i, prompt in enumerate(prompts):
        harness.send(sequence(f"p{i}", prompt, pools=True))
    harness.run()
    ends = [harness.end(f"p{i}") for i in range(len(prompts))]
    assert all((end.token_ids, end.finish_reason, end.cached_tokens) == ((), "stop", 0) for end in ends)
    return [vector(end.pooled) for end in ends]


def check(got: Sequence[npt.NDArray[np.float32]], expected: Sequence[torch.Tensor]) -> None:
    for vector_, mean in zip(got, expected, strict=True):
        error = np.linalg.norm(vector_ - mean.numpy()) / np.linalg.norm(mean.numpy())
        assert error < CLOSE


@pytest.mark.parametrize("chunk", CHUNKS)
def test_pooled_states_are_transformers_own(chunk: int, tiny: LoadedModel) -> None:
    prompts = license_prompts(tiny.card.folder, LENGTHS)
    assert tiny.path.name.startswith("generic")
    harness = Harness(tiny, max_num_batched_tokens=chunk)
    shuffle_pool(harness)
    check(pooled(harness, prompts), mean_states(tiny.card.folder, prompts))


@pytest.mark.parametrize("kind", RUNNABLE)
def test_pooled_states_of_the_fused_path_are_transformers_own_and_bit_equal_for_any_cut(
    kind: str, fused_folder: Path
) -> None:
    kernels(kind)
    model = load_model(fused_folder, dtype="float32", kernels=kind)
    assert model.path.name == f"fused:{kind}"
    prompts = license_prompts(fused_folder, LENGTHS)
    found = [pooled(Harness(model, max_num_batched_tokens=chunk), prompts) for chunk in (*CHUNKS, 512)]
    check(found[0], mean_states(fused_folder, prompts))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "Llama"])
def test_pooled_states_of_the_fused_family(name: str, tmp_path: Path) -> None:
    kernels(RUNNABLE[0]) if RUNNABLE else pytest.skip("no kernels run here")
    folder = make_model(name, tmp_path)
    model = load_model(folder, dtype="float32", kernels=RUNNABLE[0])
    prompts = license_prompts(folder, (1, 33, 150))
    check(pooled(Harness(model, max_num_batched_tokens=64), prompts), mean_states(folder, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
def test_pooled_states_of_the_default_model(chunk: int, model: LoadedModel) -> None:
    prompts = license_prompts(model.card.folder, (1, 16, 63, 200, 300))
    check(pooled(Harness(model, max_num_batched_tokens=chunk), prompts), mean_states(model.card.folder, prompts))


def test_a_step_gives_the_same_logits_with_sums_beside_them(fused_folder: Path) -> None:
    """What others draw from does not change where one sequence of the step pools, on neither path."""
    for kind in ("off", *RUNNABLE[:1]):
        model = load_model(fused_folder, dtype="float32", kernels=kind)
        ids, other = license_prompts(fused_folder, (40, 30))
        spans = [Span(ids, 0, [0, 1, 2]), Span(other, 0, [3, 4])]
        plain = model.path.forward(Harness(model).engine.runner._memory, spans, [(0, 39)])
        sums = {1: torch.zeros(model.path.hidden_size)}
        beside = model.path.forward(Harness(model).engine.runner._memory, spans, [(0, 39)], None, sums)
        assert torch.equal(plain.logits, beside.logits)
        check([(sums[1] / 30).numpy()], mean_states(fused_folder, [other]))


def test_a_prompt_that_pools_takes_no_cached_block_and_leaves_none(tiny: LoadedModel) -> None:
    prompt = license_prompts(tiny.card.folder, (100,))[0]
    harness = Harness(tiny, max_num_batched_tokens=64)
    harness.send(sequence("first", prompt, sampling=Sampling(max_tokens=1)))
    harness.run()
    cached = harness.pool.counts().cached
    assert cached == 100 // 16
    check(pooled(harness, [prompt]), mean_states(tiny.card.folder, [prompt]))
    assert harness.pool.counts().cached == cached
    assert harness.engine.tally.prompt_tokens_computed == 200
    others = license_prompts(tiny.card.folder, (50, 60))[1:]
    pooled(Harness(tiny), others)
    harness.send(sequence("again", prompt, sampling=Sampling(max_tokens=1)))
    harness.run()
    assert harness.end("again").cached_tokens == 96


def test_pooling_goes_on_after_a_preemption_and_beside_answers(tiny: LoadedModel) -> None:
    """A pool that is too small for all of them at once: whoever loses its blocks begins its sum again."""
    prompts = license_prompts(tiny.card.folder, (90, 120, 60, 300))
    harness = Harness(tiny, num_blocks=24, max_num_batched_tokens=32)
    for i in range(3):
        prompt = license_prompts(tiny.card.folder, (40 + i,))[0]
        harness.send(sequence(f"a{i}", prompt, sampling=Sampling(max_tokens=60, ignore_eos=True)))
    check(pooled(harness, prompts), mean_states(tiny.card.folder, prompts))
    assert all(len(harness.tokens(f"a{i}")) == 60 for i in range(3))
    assert harness.pool.counts().used == 0


def test_an_aborted_prompt_leaves_nothing(tiny: LoadedModel) -> None:
    harness = Harness(tiny, max_num_batched_tokens=16)
    harness.send(sequence("gone", license_prompts(tiny.card.folder, (100,))[0], pools=True))
    harness.step()
    harness.send(AbortSequence(seq_id="gone"))
    harness.run()
    assert harness.end("gone").finish_reason == "abort"
    assert harness.pool.counts().free == harness.pool.num_blocks
    prompts = license_prompts(tiny.card.folder, (40,))
    check(pooled(harness, prompts), mean_states(tiny.card.folder, prompts))


def test_a_prompt_may_fill_the_whole_context_and_nothing_may_be_asked_beside(tiny: LoadedModel) -> None:
    harness = Harness(tiny, max_model_len=64)
    whole, longer = license_prompts(tiny.card.folder, (64, 65))
    harness.send(sequence("whole", whole, pools=True), sequence("longer", longer, pools=True))
    harness.send(sequence("several", whole[:5], pools=True, n=2))
    harness.send(sequence("scored", whole[:5], pools=True, sampling=Sampling(prompt_logprobs=0)))
    harness.run()
    assert harness.end("whole").pooled
    assert harness.end("longer").error_code == str(ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    assert {harness.end(x).error_code for x in ("several", "scored")} == {str(ErrorCode.INVALID_REQUEST)}
