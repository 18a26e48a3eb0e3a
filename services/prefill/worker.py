"""A prefill worker, put together."""

from __future__ import annotations

from pathlib import Path

from services.config import ServeConfig
from services.prefill.writer import Writer
from services.worker.runtime import WorkerRuntime


def build(config: ServeConfig, model_folder: Path, role: str = "prefill", worker_id: str = "") -> WorkerRuntime:
    """Not started. ``model_folder`` is a prepared one."""
    return WorkerRuntime(config, role, model_folder, Writer, worker_id)
