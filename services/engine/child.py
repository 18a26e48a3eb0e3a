"""The engine's process: ``python -m services.engine.child PIPE_FD PARENT_PID MEMFD PROGRESS_FD CONFIG_JSON``.

    start ─► load ─► warm up ─► EngineReady ─► ( drain the pipe ─► one step ) … ─► Stop or end of the pipe

It blocks on the pipe while there is nothing to compute, and polls it between steps. PROGRESS_FD is -1 where nobody
receives layers. CONFIG_JSON is what `child_config` writes. The process dies with its parent, and ignores Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry
from kvstore.process import ChildChannel, die_with_parent
from services.config import ROLES, EngineConfig
from services.engine.messages import CODEC, EngineReady, Stop
from services.tier_config import DEFAULT_TIER, TierConfig

log = logging.getLogger("pdray.engine")

EXIT_REFUSED = 3
"""Exit code where the model or a setting was refused; the last line on stderr says why."""
CHILD_ENV = {"GOMP_SPINCOUNT": "10000", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
"""For the process's start: idle threads of torch spin for microseconds, not for ever. With more threads than free
cores, endless spinning made a prefill of 200 tokens take 5 s instead of 0.5 s; on a free machine this costs nothing.
LMCache, where it is the tier, reports to nobody, and logs what went wrong."""
_HANG_S = 3600.0


def child_config(
    *,
    folder: Path,
    role: str,
    dtype: str,
    max_model_len: int,
    engine: EngineConfig,
    geometry: KVGeometry,
    trust_remote_code: bool = False,
    hang_after_step: int | None = None,
    tier: TierConfig = DEFAULT_TIER,
) -> str:
    """The argument CONFIG_JSON.

    Args:
        dtype: resolved, as the geometry's.
        hang_after_step: for tests of those who watch the engine: it stops answering after so many steps.
    """
    return json.dumps(
        {
            "folder": str(folder),
            "role": role,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "engine": asdict(engine),
            "tier": asdict(tier),
            "geometry": geometry.to_dict(),
            "trust_remote_code": trust_remote_code,
            "hang_after_step": hang_after_step,
        }
    )


def serve(channel: ChildChannel, memory_fd: int, progress_fd: int, config: dict[str, Any]) -> None:
    """Load, announce, and run until Stop or EOFError."""
    from services.engine.build import build_engine

    hang_after = config["hang_after_step"]
    engine = build_engine(channel.send, memory_fd, progress_fd, config)
    pool = engine.scheduler.roster.pool
    channel.send(
        EngineReady(
            pid=os.getpid(),
            geometry=config["geometry"],
            num_blocks=pool.num_blocks,
            max_model_len=engine.scheduler.limits.max_model_len,
            dtype=config["dtype"],
            vocab_size=engine.scheduler.limits.vocab_size,
            attention=engine.runner.model.attention,
            path=engine.runner.model.path.name,
            path_note=engine.runner.model.note,
            hidden_size=engine.runner.model.path.hidden_size,
        )
    )
    busy = False
    try:
        while True:
            for message in channel.receive(0 if busy else engine.patience_s):
                if isinstance(message, Stop):
                    return
                engine.handle(message)
            busy = engine.advance()
            if hang_after is not None and engine.num_steps >= hang_after:
                time.sleep(_HANG_S)
    finally:
        engine.tiers.close()  # whose threads would keep the process


def main(argv: list[str]) -> int:
    pipe_fd, parent_pid, memory_fd, progress_fd = (int(a) for a in argv[:4])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service process drains first
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    channel = ChildChannel(pipe_fd, CODEC)
    config = json.loads(argv[4])
    if config["role"] not in ROLES:
        log.error("unknown role %s", config["role"])
        return EXIT_REFUSED
    try:
        serve(channel, memory_fd, progress_fd, config)
    except EOFError:
        return 0
    except ConfigError as exc:
        log.error("%s", exc)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
