"""A GGUF file becomes a folder of safetensors, config, tokenizer and chat template; weights are unpacked once.

The conversion is transformers' own. What it loses is put back here: how digits are cut in some byte-level vocabularies,
and whether a prompt begins with the bos token.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

_DIGIT_VOCABULARIES = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""Values of tokenizer.ggml.pre whose vocabulary takes each digit alone, before the words are cut."""
_PLAIN_VOCABULARIES = {"default", "gpt-2", "gpt2", "olmo", "jais", "phi-2", "mpt"}
"""Those that cut as GPT-2 does, which is what the conversion assumes of a name it does not know."""
_DENSE_FILE_TYPES = {0, 1, 32}  # general.file_type: all float32, mostly float16, mostly bfloat16


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """What the header says beyond config and vocabulary."""

    pre_tokenizer: str
    add_bos: bool
    is_quantized: bool


def read_info(path: Path) -> GgufInfo:
    """Raises ConfigError where the file is no GGUF."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as exc:
        raise ConfigError(f"model.path: {path} is no readable GGUF file: {exc}") from None

    def value(key: str, missing: Any) -> Any:
        field = reader.get_field(key)
        return missing if field is None else field.contents()

    model = value("tokenizer.ggml.model", "")
    return GgufInfo(
        pre_tokenizer=str(value("tokenizer.ggml.pre", "default")) if model == "gpt2" else "",
        add_bos=bool(value("tokenizer.ggml.add_bos_token", model == "llama")),
        is_quantized=int(value("general.file_type", 0)) not in _DENSE_FILE_TYPES,
    )


def saved_dtype(info: GgufInfo, dtype: str) -> str:
    """What the unpacked weights are saved in; ``auto``: bfloat16 for quantized files, whose own error is far larger."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if info.is_quantized else "float32"


def convert(path: Path, target: Path, dtype: str, progress: Callable[[str], None]) -> GgufInfo:
    """Write config.json, *.safetensors, tokenizer.json and the chat template into ``target``.

    Args:
        dtype: of the saved weights; ``auto``: see `saved_dtype`.
    Raises:
        ConfigError: transformers cannot read this architecture or vocabulary.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    info = read_info(path)
    saved = saved_dtype(info, dtype)
    progress(f"unpacking {path.name} ({path.stat().st_size >> 20} MiB) as {saved}")
    where, name = str(path.parent), path.name
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
            model = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, saved)
            )
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    except (ValueError, KeyError, NotImplementedError) as exc:
        raise ConfigError(f"model.path: {path} cannot be unpacked: {exc}") from None
    progress("saving safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _restore_digits(info, target / "tokenizer.json", progress)
    return info


def _restore_digits(info: GgufInfo, tokenizer_file: Path, progress: Callable[[str], None]) -> None:
    data = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    words = data.get("pre_tokenizer") or {}
    is_plain = words.get("type") == "ByteLevel" and words.get("use_regex")
    if not info.pre_tokenizer or not is_plain or info.pre_tokenizer in _PLAIN_VOCABULARIES:
        return
    if info.pre_tokenizer not in _DIGIT_VOCABULARIES:
        progress(
            f"warning: how the vocabulary {info.pre_tokenizer!r} cuts words is not known; GPT-2's way is assumed, "
            "token ids may differ from the original's"
        )
        return
    digits = {"type": "Digits", "individual_digits": True}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, words]}
    tokenizer_file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
