"""What the flow needs of its router, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.config import ServeConfig
from services.router.admission.gate import Gate
from services.router.calls import WorkerCalls
from services.router.fabric import FabricMeter
from services.router.health import Health
from services.router.links import RouterIdentity
from services.router.record import Recorder
from services.router.switchboard import Switchboard
from services.router.view import View
from services.telemetry.metrics import RouterMetrics


@dataclass(slots=True, kw_only=True)
class Deps:
    """What all requests share."""

    config: ServeConfig  # replaced as a whole by `RouterCore.reconfigure`
    identity: RouterIdentity
    view: View
    gate: Gate
    health: Health
    recorder: Recorder
    calls: Callable[[str], WorkerCalls | None]
    switchboard: Switchboard
    fabric: FabricMeter
    metrics: RouterMetrics
    clock: Callable[[], float]
    next_turn: Callable[[], int]
