"""When an engine counts as stalled: after the limit, but never within three of its own full steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.engine import messages as m
from services.prefill.writer import Writer
from services.protocol.proto import worker_pb2
from services.worker.core import WorkerCore
from tests.unit.handoff_rig import GEOMETRY, config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(**settings: Any) -> tuple[WorkerCore, Clock]:
    fingerprint = worker_pb2.Fingerprint(geometry_json=json.dumps(GEOMETRY.to_dict()))
    clock = Clock()
    registration = worker_pb2.Registration(worker_id="p", fingerprint=fingerprint)
    return WorkerCore(config(**settings), registration, Writer, clock), clock


async def test_an_engine_that_answers_is_never_stalled_and_a_silent_one_is_after_the_limit() -> None:
    core, clock = make()
    sent: list[Any] = []
    core.send_engine = sent.append
    for _ in range(20):
        clock.now += 4.0
        assert not core.stalled()
        core.ping_engine()
        core.on_engine(m.Steps(json="[]"))
    clock.now += 5.1
    assert core.stalled()


@pytest.mark.parametrize(("rate", "silent_s", "stalled"), [(0.0, 6.0, True), (50.0, 15.0, False), (50.0, 16.0, True)])
async def test_a_slow_engine_may_take_three_full_steps(rate: float, silent_s: float, stalled: bool) -> None:
    core, clock = make()  # 256 tokens a step: 5.12 s at 50 tokens/s
    core.on_engine(m.StepDone(outputs=(), stored=(), removed=(), stats=m.Stats(prefill_tokens_per_s=rate)))
    clock.now += silent_s
    assert core.stalled() is stalled
