"""Simulated links: one from each worker to each other, in which transfers follow one another."""

from __future__ import annotations

from services.replay.costs import CostModel

Way = tuple[str, str]
"""Writer and reader."""


class Links:
    """When a transfer that begins now is over. The caller asks in the order in which transfers begin."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._free_s: dict[Way, float] = {}

    def move(self, way: Way, tokens: int, now_s: float) -> float:
        """KV that exists already."""
        return self._occupy(way, tokens, now_s)

    def hand_off(self, way: Way, tokens: int, start_s: float, computed_s: float) -> float:
        """KV that is computed from ``start_s`` to ``computed_s``: layers move meanwhile, but for the last one."""
        costs = self._costs
        last_s = (costs.transfer_setup_ms + costs.wire_ms(tokens) / costs.num_layers) / 1000
        done_s = max(self._occupy(way, tokens, start_s), computed_s + last_s)
        self._free_s[way] = max(self._free_s[way], done_s)
        return done_s

    def _occupy(self, way: Way, tokens: int, start_s: float) -> float:
        begin_s = max(start_s, self._free_s.get(way, 0.0))
        done_s = begin_s + (self._costs.transfer_setup_ms + self._costs.wire_ms(tokens)) / 1000
        self._free_s[way] = done_s
        return done_s
