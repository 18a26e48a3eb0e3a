"""What router and workers know of a prepared model: one small JSON file, ``pdray.json``, beside the weights.

`services.engine.prepare` writes it once; whoever serves the model reads it with `ModelCard.load`. Needs neither torch
nor transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

CARD_FILE = "pdray.json"
TOKENIZER_FILE = "tokenizer.json"
CARD_VERSION = 1
"""Raised when a card of an older version can no longer be read; such a model is prepared anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A prepared model. Two folders with equal fingerprints hold the same weights and the same tokenizer."""

    folder: Path
    """Where the card lies, with config.json, tokenizer.json and *.safetensors."""
    name: str
    """Name in the OpenAI API unless the configuration gives another."""
    architecture: str
    """Class of transformers, e.g. LlamaForCausalLM."""
    model_fingerprint: str
    """Hex digest over safetensors headers, sizes, and 64 KiB of head and tail of each tensor."""
    tokenizer_fingerprint: str
    """Hex digest of tokenizer.json."""
    max_model_len: int
    """Positions the model was made for, prompt and answer together."""
    vocab_size: int
    """Rows of the output layer; valid ids are below it."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; may be empty."""
    bos_token_id: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    native_dtype: str
    """Of the weights as they were published, e.g. bfloat16."""
    add_bos: bool = False
    """A plain prompt begins with `bos_token_id`. Encode with add_special_tokens=False and put it there yourself; chat
    templates write it themselves."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Names that a chat template may use, such as bos_token and eos_token, and their text."""
    chat_template: str | None = None
    """jinja2 source; None where the model has none."""
    version: int = CARD_VERSION

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @classmethod
    def load(cls, folder: str | Path) -> ModelCard:
        """Read the card of a prepared folder.

        Raises:
            ConfigError: the folder is not prepared, or by another version of pdray; the message says how to mend it.
        """
        folder = Path(folder)
        path = folder / CARD_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"model.path: {folder} holds no {CARD_FILE}: prepare it with `pdray prepare --model PATH`"
            ) from None
        except (OSError, ValueError) as exc:
            raise ConfigError(f"model.path: {path} is unreadable: {exc}") from None
        if not isinstance(data, dict) or data.get("version") != CARD_VERSION:
            found = data.get("version") if isinstance(data, dict) else None
            raise ConfigError(
                f"model.path: {path} has version {found}, this pdray reads {CARD_VERSION}: delete the folder"
            )
        known = {f.name for f in dataclasses.fields(cls)} - {"folder", "chat_template"}
        try:
            values = {key: value for key, value in data.items() if key in known}
            values["eos_token_ids"] = tuple(values["eos_token_ids"])
            return cls(folder=folder, chat_template=read_chat_template(folder), **values)
        except (TypeError, KeyError) as exc:
            raise ConfigError(f"model.path: {path} is incomplete: {exc}") from None

    def to_dict(self) -> dict[str, Any]:
        """What `load` reads: every field but the folder and the template, which lie beside it."""
        skipped = ("folder", "chat_template")
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        return {**data, "eos_token_ids": list(self.eos_token_ids), "special_tokens": dict(self.special_tokens)}


def read_chat_template(folder: Path) -> str | None:
    """The template in chat_template.jinja, else the (``default``) one in tokenizer_config.json, else None."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path: {folder / 'tokenizer_config.json'} is unreadable: {exc}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None
