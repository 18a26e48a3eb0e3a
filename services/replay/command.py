"""`pdray replay`: from options to a table, or to one JSON line for each policy."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvstore.errors import ConfigError
from services.config import PAIR_POLICIES
from services.replay.cluster import Replay
from services.replay.costs import COST_MODELS
from services.replay.outcome import Outcome, Targets, as_dict, as_table, outcome
from services.replay.record import Setting
from services.replay.traffic import load_trace, varied


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    trace: Path
    policies: tuple[str, ...]
    prefill: int = 16
    decode: int = 16
    scale_rate: float = 1.0
    seed: int = 0
    cost_model: str = "llama-70b"
    pulls: bool = True
    as_json: bool = False
    targets: Targets = field(default_factory=Targets)

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in PAIR_POLICIES:
                raise ConfigError(f"--policy must be one of {', '.join(PAIR_POLICIES)}, got {policy!r}")
        if self.cost_model not in COST_MODELS:
            raise ConfigError(f"--cost-model must be one of {', '.join(COST_MODELS)}, got {self.cost_model!r}")
        if self.prefill < 1 or self.decode < 1:
            raise ConfigError(f"--prefill and --decode must be at least 1, got {self.prefill} and {self.decode}")
        if not self.scale_rate > 0:
            raise ConfigError(f"--scale-rate must be above 0, got {self.scale_rate}")


def run(options: Options, out: Console) -> None:
    """Replay the trace under each policy in turn. Raises ConfigError for a trace that cannot be read."""
    requests = varied(load_trace(options.trace), options.seed, scale_rate=options.scale_rate)
    found: list[Outcome] = []
    for policy in options.policies:
        began_s = time.monotonic()
        setting = Setting(
            policy=policy,
            prefill=options.prefill,
            decode=options.decode,
            costs=COST_MODELS[options.cost_model],
            seed=options.seed,
            pulls=options.pulls,
        )
        result = outcome(Replay(requests, setting).run(), setting, options.targets)
        found.append(result)
        if options.as_json:
            about = {
                "trace": options.trace.name, "prefill": options.prefill, "decode": options.decode,
                "scale_rate": options.scale_rate, "seed": options.seed, "cost_model": options.cost_model,
                "pulls": options.pulls, "took_s": round(time.monotonic() - began_s, 2),
            }  # fmt: skip
            out.print(json.dumps(about | as_dict(result)), markup=False, highlight=False, soft_wrap=True)
    if not options.as_json:
        out.print(as_table(found))
