"""The fused path gives the generic path's numbers, on every kind of kernels that runs here, and is invariant."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvstore.errors import ConfigError
from services.engine.batch import PagedMemory, Span
from services.engine.computation import ModelPath
from services.engine.likeness import TOLERANCE, difference
from services.engine.loader import LoadedModel, load_model
from tests.native_models import FAMILY, RUNNABLE, kernels, make_model

BLOCK_SIZE, NUM_BLOCKS, LENGTH = 16, 24, 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in FAMILY}


def memory_for(model: LoadedModel) -> PagedMemory:
    """Full of NaN, as nobody may read what its sequence has not written."""
    shape = (NUM_BLOCKS, 2, model.card.num_kv_heads, BLOCK_SIZE, model.card.head_dim)
    nan = float("nan")
    return PagedMemory.over(
        [torch.full(shape, nan, dtype=getattr(torch, model.dtype)) for _ in range(model.card.num_layers)]
    )


def logits_of(model: LoadedModel, path: ModelPath, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Of every position, computed in chunks that end at ``cuts``."""
    memory, parts = memory_for(model), []
    table = random.Random(5).sample(range(NUM_BLOCKS), -(-len(ids) // BLOCK_SIZE))
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        seen: list[int] = []
        done = path.forward(
            memory, [Span(ids[start:stop], start, table)], [(0, i) for i in range(stop - start)], seen.append
        )
        assert done.sound == (True,)
        assert seen == list(range(model.card.num_layers))
        parts.append(done.logits)
    return torch.cat(parts)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize("name", FAMILY)
def test_the_fused_path_equals_the_generic_one(name: str, kind: str, dtype: str, folders: dict[str, Path]) -> None:
    kernels(kind)
    fused = load_model(folders[name], dtype=dtype, kernels=kind)
    plain = load_model(folders[name], dtype=dtype, kernels="off")
    assert (fused.path.name, plain.path.name) == (f"fused:{kind}", "generic:reference")
    ids = prompt(1)
    got = logits_of(fused, fused.path, ids, [1, 40, 41, 73])
    expected = logits_of(plain, plain.path, ids, [])
    assert difference(got, expected) < TOLERANCE[getattr(torch, dtype)] / (10 if dtype == "float32" else 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize("name", ["Mistral", "Qwen3"])
def test_numbers_depend_on_neither_chunks_nor_neighbours_nor_threads(
    name: str, kind: str, dtype: str, folders: dict[str, Path]
) -> None:
    kernels(kind)
    model = load_model(folders[name], dtype=dtype, kernels=kind)
    assert model.is_batch_invariant
    ids = prompt(2)
    whole = logits_of(model, model.path, ids, [])
    for seed in range(4):
        cuts = sorted(random.Random(seed).sample(range(1, LENGTH), 5))
        assert torch.equal(logits_of(model, model.path, ids, cuts), whole), f"cuts {cuts}"
    token_by_token = list(range(LENGTH - 40, LENGTH))
    assert torch.equal(logits_of(model, model.path, ids, token_by_token), whole)
    memory = memory_for(model)
    spans = [
        Span(prompt(3, 33), 0, [1, 3, 5]),
        Span(ids[:100], 0, [2, 4, 6, 8, 10, 12, 14]),
        Span(prompt(4, 1), 0, [7]),
    ]
    among = model.path.forward(memory, spans, [(1, i) for i in range(100)]).logits
    assert torch.equal(among, whole[:100])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        other = load_model(folders[name], dtype=dtype, kernels=kind)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits_of(other, other.path, ids, [64]), whole)


def test_a_sequence_with_broken_numbers_is_named_and_its_neighbours_are_sound(folders: dict[str, Path]) -> None:
    kernels("auto")
    model = load_model(folders["Llama"], dtype="float32")
    memory = memory_for(model)
    ids = prompt(6, 20)
    spans = [Span(ids, 0, [0, 1]), Span([9], 40, [2, 3, 4]), Span(ids, 0, [5, 6])]  # the second one's past is NaN
    done = model.path.forward(memory, spans, [(0, 19), (2, 19)])
    assert done.sound == (True, False, True)
    assert torch.equal(done.logits[0], done.logits[1])


def test_memory_does_not_grow_with_the_context(folders: dict[str, Path]) -> None:
    kernels("auto")
    model = load_model(folders["Llama"], dtype="float32")
    memory = memory_for(model)
    table = list(range(NUM_BLOCKS))
    held = []
    for start in (0, 100, 300):
        model.path.forward(memory, [Span([5], start, table)], [(0, 0)])
        held.append(model.path.held_bytes())  # type: ignore[attr-defined]
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Llama", {"hidden_act": "gelu"}, "activation"),
        ("Llama", {"head_dim": 24}, "head_dim 24"),
        ("Llama", {"attention_bias": True}, "biases"),
        ("Qwen2", {"hidden_size": 104}, "hidden_size 104"),
        ("Olmo2", {}, "Llama family"),
    ],
)
def test_what_the_kernels_do_not_compute_goes_the_generic_way(
    name: str, settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    kernels("auto")
    model = load_model(make_model(name, tmp_path, **settings), dtype="float32")
    assert model.path.name.startswith("generic:")
    assert reason in model.note
    assert not model.is_batch_invariant


def test_kernels_asked_for_by_name_must_run_here(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.native.library.cpu_flags", lambda: frozenset({"avx2"}))
    from services.engine.native.library import load_kernels

    load_kernels.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"engine\.kernels: this CPU has no amx"):
            load_model(folders["Llama"], dtype="float32", kernels="amx")
        plain = load_model(folders["Llama"], dtype="float32")
        assert (plain.path.name, plain.note) == ("generic:reference", "this CPU has neither AVX-512 nor AVX2 with FMA")
    finally:
        load_kernels.cache_clear()
