"""Who goes next: every order gives a request one key on arrival, and the least key goes first.

    fcfs      its arrival
    edf       its arrival plus its target of the first token, or plus the budget where it has none
    priority  its arrival plus `priority_s` for each level: strict among those that came within that time of each other
    fair      its start tag: the virtual time now, or where its tenant's last request ends, if that is later

No key is ever infinite, so nobody starves: what comes late enough has a larger key under each of them. Under ``fair`` a
tenant's tag grows by tokens over weight, so tenants that always have something waiting get tokens in proportion to
their weights, however much each of them sends. Source of the tags: P. Goyal, H. Vin, H. Cheng, "Start-time fair
queueing", SIGCOMM 1996.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_TENANTS = 4096
"""Tenants whose tags are kept. Those behind the virtual time are forgotten first, which changes nothing; then the older
half, which forgives them what they had before others."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A request in the queue, or about to enter it."""

    request_id: str
    tenant: str = ""
    priority: int = 0  # lower first
    tokens: int = 1  # of the prompt
    arrived_s: float = 0.0
    deadline_s: float = 0.0  # by which its first token is due
    key: tuple[float, int] = (0.0, 0)  # set by `Order.enter`


class Order:
    """Gives keys; reads no clock."""

    def __init__(self, name: str, *, priority_s: float = 10.0, weights: Mapping[str, float] | None = None) -> None:
        """``name``: one of `services.slo_config.ORDERS`."""
        self._name = name
        self._priority_s = priority_s
        self._weights = dict(weights or {})
        self._arrivals = 0
        self._virtual = 0.0
        self._last_tag: dict[str, float] = {}  # tenant -> where its latest request ends

    def enter(self, w: Waiting) -> None:
        """A request came: give it its key."""
        self._arrivals += 1
        w.key = (self._rank(w), self._arrivals)

    def left(self, w: Waiting) -> None:
        """It was sent to its workers: the virtual time is its start tag."""
        self._virtual = max(self._virtual, w.key[0]) if self._name == "fair" else 0.0

    def withdrawn(self, w: Waiting) -> None:
        """It was shed or cancelled: its tenant pays nothing for it, unless later requests stand behind it already."""
        start, end = w.key[0], w.key[0] + self._cost(w.tenant, w.tokens)
        if self._name == "fair" and self._last_tag.get(w.tenant) == end:
            self._last_tag[w.tenant] = start

    def charge(self, tenant: str, tokens: int) -> None:
        """Its answer had so many tokens, which nobody could know before."""
        if self._name == "fair":
            self._last_tag[tenant] = max(self._virtual, self._last_tag.get(tenant, 0.0)) + self._cost(tenant, tokens)

    def _rank(self, w: Waiting) -> float:
        if self._name == "fcfs":
            return float(self._arrivals)
        if self._name == "edf":
            return w.deadline_s
        if self._name == "priority":
            return w.arrived_s + w.priority * self._priority_s
        start = max(self._virtual, self._last_tag.get(w.tenant, 0.0))
        self._last_tag[w.tenant] = start + self._cost(w.tenant, w.tokens)
        self._forget()
        return start

    def _cost(self, tenant: str, tokens: int) -> float:
        return tokens / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        if len(self._last_tag) <= MAX_TENANTS:
            return
        for tenant in [t for t, tag in self._last_tag.items() if tag <= self._virtual]:
            del self._last_tag[tenant]
        if len(self._last_tag) > MAX_TENANTS:
            for tenant in list(self._last_tag)[: MAX_TENANTS // 2]:
                del self._last_tag[tenant]
