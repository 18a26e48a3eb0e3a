"""The last steps of an engine, and the speed that they tell."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from services.engine.runner import Executed
from services.engine.scheduler import Scheduler, Step

_EWMA = 0.2  # weight of the newest step


class StepLog:
    """Keeps the last ``steps_kept`` steps that computed anything."""

    def __init__(self, scheduler: Scheduler, steps_kept: int) -> None:
        self._scheduler = scheduler
        self.prefill_rate = 0.0  # tokens per second, moving mean
        self.decode_ms = 0.0  # of a step that decodes only, moving mean
        self._steps: deque[dict[str, Any]] = deque(maxlen=steps_kept)

    def last(self, count: int) -> str:
        """The last steps as JSON, oldest first."""
        return json.dumps(list(self._steps)[-count:] if count > 0 else [])

    def note(self, number: int, step: Step, done: Executed, duration_ms: float) -> None:
        """Remember what a step did, and learn the worker's speed from it."""
        prefill_tokens = sum(w.count for w in step.work if not w.is_decode)
        if not prefill_tokens:
            self.decode_ms = _blend(self.decode_ms, duration_ms)
        else:
            own_ms = max(duration_ms - self.decode_ms * (len(step.work) > 1), duration_ms * 0.1)
            self.prefill_rate = _blend(self.prefill_rate, prefill_tokens * 1e3 / own_ms)
        self._steps.append(
            {
                "step": number,
                "decodes": sum(w.is_decode for w in step.work),
                "prefill_tokens": prefill_tokens,
                "recomputed_tokens": done.tally.tokens_recomputed,
                "sequences": len(step.work),
                "running": self._scheduler.num_running,
                "queued": len(self._scheduler.roster.queue),
                "waiting": dict(step.waiting),
                "preemptions": step.preemptions,
                "failed": len(done.taken.failures),
                "duration_ms": round(duration_ms, 3),
            }
        )


def _blend(average: float, value: float) -> float:
    return value if not average else average + _EWMA * (value - average)
