"""The card of a folder of safetensors, read from its config, its tokenizer and the headers of its weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from services.engine.fingerprint import file_fingerprint, model_fingerprint, read_header
from services.protocol.model_card import TOKENIZER_FILE, ModelCard, read_chat_template

_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def describe(folder: Path, name: str, facts: dict[str, Any], trust_remote_code: bool = False) -> ModelCard:
    """The card; ``facts`` override what the files seem to say.

    Raises:
        ConfigError: a file is missing or broken, or the model is of a kind that cannot be served.
    """
    from transformers import AutoConfig

    from services.engine.loader import check_config

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as exc:
        raise ConfigError(f"model.path: the config of {name} is not understood: {exc}") from None
    check_config(config, name)
    heads = int(config.num_attention_heads)
    weights = sorted(folder.glob("*.safetensors"))
    values: dict[str, Any] = {
        "name": name,
        "architecture": (config.architectures or [""])[0],
        "model_fingerprint": model_fingerprint(weights),
        "tokenizer_fingerprint": file_fingerprint(folder / TOKENIZER_FILE),
        "max_model_len": int(config.max_position_embeddings),
        "vocab_size": int(config.vocab_size),
        "num_layers": int(config.num_hidden_layers),
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "native_dtype": _majority_dtype(weights),
        "chat_template": read_chat_template(folder),
        **_tokens(folder, config),
        **facts,
    }
    return ModelCard(folder=folder, **values)


def _majority_dtype(weights: list[Path]) -> str:
    """Of the bytes of all tensors."""
    sizes: Counter[str] = Counter()
    for path in weights:
        with path.open("rb") as file:
            _, header = read_header(file, path)
        for entry in header.values():
            first, last = entry["data_offsets"]
            sizes[entry["dtype"]] += last - first
    kind = sizes.most_common(1)[0][0] if sizes else "F32"
    return _DTYPE_NAMES.get(kind, kind.lower())


def _tokens(folder: Path, config: Any) -> dict[str, Any]:
    """Special tokens: ids that end an answer, the bos token, and the texts that a template may name."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    special = _special_texts(folder)
    generation = _read_json(folder / "generation_config.json")
    eos = _ids(generation.get("eos_token_id")) or _ids(getattr(config, "eos_token_id", None))
    named = tokenizer.token_to_id(special.get("eos_token", ""))
    if named is not None and named not in eos:
        eos.append(named)
    bos = tokenizer.token_to_id(special.get("bos_token", ""))
    if bos is None:
        bos = next(iter(_ids(getattr(config, "bos_token_id", None))), None)
    encoded = tokenizer.encode("a", add_special_tokens=True).ids
    return {
        "eos_token_ids": tuple(i for i in eos if 0 <= i < config.vocab_size),
        "bos_token_id": bos,
        "add_bos": bos is not None and len(encoded) > 1 and encoded[0] == bos,
        "special_tokens": special,
    }


def _special_texts(folder: Path) -> dict[str, str]:
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_json(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ConfigError(f"model.path: {path} is not JSON: {exc}") from None
    return data if isinstance(data, dict) else {}
