"""A decode or mixed worker, put together."""

from __future__ import annotations

from pathlib import Path

from services.config import ServeConfig
from services.decode.reader import Reader
from services.worker.runtime import WorkerRuntime


def build(config: ServeConfig, model_folder: Path, role: str = "decode", worker_id: str = "") -> WorkerRuntime:
    """Not started. ``model_folder`` is a prepared one."""
    return WorkerRuntime(
        config, role, model_folder, lambda core: Reader(core, takes_prompts=role == "mixed"), worker_id
    )
