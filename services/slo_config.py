"""Settings of promises and admission: sections ``slo``, ``admission`` and ``health``. Read by `services.config`."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine_config import require

ORDERS = ("fcfs", "edf", "priority", "fair")


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOConfig:
    """Targets of requests that name none of their own; see docs/admission.md. 0: no target, so no refusal by it."""

    ttft_ms: float = 0.0
    """From the request's arrival to its first token."""
    tpot_ms: float = 0.0
    """Mean time of each token after the first."""
    e2e_ms: float = 0.0
    """From the request's arrival to the end of its answer."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            require(getattr(self, name) >= 0, f"slo.{name}", f"must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """The router's queue: who goes next, how many may wait, and when a worker takes one more."""

    order: str = "priority"
    """``fcfs``; ``edf``, earliest target of the first token; ``priority``, lower values first; ``fair``, tenants share
    what is computed by their weights."""
    max_waiting: int = 512
    """Requests that may wait. Past it the lowest priority is shed, and of equal ones the last in order."""
    max_waiting_tokens: int = 1 << 20
    """Prompt tokens that may wait, by the same rule; one request alone is never too long."""
    held_steps: float = 2.0
    """Steps of prompt work (``engine.max_num_batched_tokens`` each) that a worker holds before the next request is sent
    to it; 0: everything is sent at once, and workers queue it."""
    priority_s: float = 10.0
    """What one level of priority is worth in waiting: who has waited for so long goes before the next better level."""
    weights: tuple[str, ...] = ()
    """``tenant=weight`` under ``fair``; a tenant that is not named weighs 1."""
    margin: float = 0.9
    """A request is refused where more than 5 of 100 like it would come past this share of the target."""

    def __post_init__(self) -> None:
        require(self.order in ORDERS, "admission.order", f"must be one of {', '.join(ORDERS)}, got {self.order!r}")
        for name in ("max_waiting", "max_waiting_tokens"):
            require(getattr(self, name) >= 1, f"admission.{name}", f"must be at least 1, got {getattr(self, name)}")
        require(self.held_steps >= 0, "admission.held_steps", f"must not be negative, got {self.held_steps}")
        require(self.priority_s > 0, "admission.priority_s", f"must be positive, got {self.priority_s}")
        require(0 < self.margin <= 1, "admission.margin", f"must be above 0 and at most 1, got {self.margin}")
        for pair in self.weights:
            require(_is_weight(pair), "admission.weights", f"must be tenant=weight with a weight above 0, got {pair!r}")

    @property
    def tenant_weights(self) -> dict[str, float]:
        """By tenant."""
        pairs = (pair.rpartition("=") for pair in self.weights)
        return {tenant.strip(): float(weight) for tenant, _, weight in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """The circuit of each worker: who fails again and again gets nothing for a while, then one request as a probe."""

    failures: int = 5
    """Failures in a row that open a circuit: errors of the worker's own and failed transfers, never 4xx or busy. 0:
    circuits never open."""
    open_s: float = 1.0
    """How long a circuit stays open before a probe; twice as long after each probe that fails."""
    max_open_s: float = 30.0
    probe_s: float = 30.0
    """A probe without a result for so long gives way to another."""

    def __post_init__(self) -> None:
        require(self.failures >= 0, "health.failures", f"must not be negative, got {self.failures}")
        for name in ("open_s", "probe_s"):
            require(getattr(self, name) > 0, f"health.{name}", f"must be positive, got {getattr(self, name)}")
        require(
            self.max_open_s >= self.open_s,
            "health.max_open_s",
            f"must be at least health.open_s ({self.open_s}), got {self.max_open_s}",
        )


def _is_weight(pair: str) -> bool:
    tenant, _, weight = pair.rpartition("=")
    try:
        return bool(tenant.strip()) and 0 < float(weight) < float("inf")
    except ValueError:
        return False
