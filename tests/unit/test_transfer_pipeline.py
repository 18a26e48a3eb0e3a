"""Layer by layer, a hand-off takes the longer of computing and sending plus about one layer; chunk by chunk, their sum.

A fake clock: each layer takes so long to compute, and a serial link so long to carry. No time passes.
"""

from __future__ import annotations

import heapq

import pytest

from kvstore.transfer import messages as m
from tests.unit.transfer_wire import LAYERS, Wire

BLOCKS = 6


def hand_off_s(compute_s: float, carry_s: float, *, layerwise: bool) -> tuple[float, list[float], list[float]]:
    """When everything is in the reader's memory, with the times at which each layer was computed and submitted."""
    wire = Wire(layerwise=layerwise, digests=False)
    wire.now_s = 0.0
    wire.source(range(BLOCKS))
    wire.grant(range(10, 10 + BLOCKS))
    wire.connect()
    wire.begin(0, BLOCKS)
    events: list[tuple[float, int, str]] = [((i + 1) * compute_s, i, "computed") for i in range(LAYERS)]
    events.append((LAYERS * compute_s, LAYERS, "end"))
    heapq.heapify(events)
    link_free_s, seen, submitted = 0.0, 0, []
    while events:
        wire.now_s, layer, what = heapq.heappop(events)
        if what == "computed":
            wire.layer(layer)
        elif what == "end":
            wire.end()
        else:
            wire.complete(count=1)
        for _ in wire.submitted[seen:]:
            submitted.append(wire.now_s)
            link_free_s = max(link_free_s, wire.now_s) + carry_s
            heapq.heappush(events, (link_free_s, LAYERS + 1, "landed"))
        seen = len(wire.submitted)
    assert [x for x in wire.told if isinstance(x, m.Pushed)], "nothing was pushed"
    return wire.now_s, [(i + 1) * compute_s for i in range(LAYERS)], submitted


@pytest.mark.parametrize(("compute_s", "carry_s"), [(1.0, 0.2), (1.0, 1.0), (0.2, 1.0)])
def test_pipelining_costs_the_longer_of_both_plus_a_layer_and_without_it_their_sum(
    compute_s: float, carry_s: float
) -> None:
    total_s, _, _ = hand_off_s(compute_s, carry_s, layerwise=True)
    longer, one_layer = LAYERS * max(compute_s, carry_s), min(compute_s, carry_s)
    assert total_s == pytest.approx(longer + one_layer)
    plain_s, _, _ = hand_off_s(compute_s, carry_s, layerwise=False)
    assert plain_s == pytest.approx(LAYERS * (compute_s + carry_s))


def test_layer_i_is_on_the_wire_while_layer_i_plus_1_computes() -> None:
    _, computed, submitted = hand_off_s(1.0, 0.9, layerwise=True)
    assert submitted == computed
    for i in range(LAYERS - 1):
        assert submitted[i] < computed[i + 1] < submitted[i] + 1.0 + 0.9
