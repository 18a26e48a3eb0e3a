"""{P, D} x {kill, stop, cut, restart} x {queued, prefill, transfer, committed, decoding} x {one pair, two pairs}.

With two pairs every request is served, with the text that it has undisturbed, by the rung that the design names; with
one pair it is served or ends with a 5xx within its budget. Afterwards every block is idle and accounted for.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.matrix.calls import SLACK_S
from tests.integration.matrix.design import CELLS, QUICK, TWO, expected
from tests.integration.matrix.experiment import AFTER, DURING, IDLE_S, Fault, Result, rung_of, story
from tests.integration.matrix.lab import Lab
from tests.integration.matrix.phases import PHASES
from tests.integration.matrix.table import PAGE
from tests.integration.matrix.world import FIRST_TOKEN_S, TOTAL_S

WATCHDOG_S = 300
"""Of the first cell of a fault, which brings the workers up and runs it; all waits inside are shorter."""

pytestmark = pytest.mark.timeout(WATCHDOG_S)


def _marks(fault: Fault) -> list[pytest.MarkDecorator]:
    return [] if fault in QUICK else [pytest.mark.slow]


CELL_PARAMS = [pytest.param(f, p, id=f"{f.id}-{p}", marks=_marks(f)) for f, p in CELLS]
FAULT_PARAMS = [pytest.param(f, id=f.id, marks=_marks(f)) for f in dict.fromkeys(f for f, _ in CELLS)]


def result_of(lab: Lab, fault: Fault) -> Result:
    if fault.kind == "cut" and lab.no_network:
        pytest.skip(lab.no_network)
    return lab.result(fault)


@pytest.mark.parametrize(("fault", "phase"), CELL_PARAMS)
def test_a_request_is_served_as_designed_or_fails_clearly(lab: Lab, fault: Fault, phase: str) -> None:
    result = result_of(lab, fault)
    call, told, wanted = result.calls[phase], result.timelines[phase], expected(fault, phase)
    seen = story(call, told)
    assert call.label not in result.hung, seen
    assert call.wall_s <= TOTAL_S + SLACK_S, seen
    if call.is_served:
        assert call.text == lab.text(phase), seen
        assert call.finish_reason == "length", seen
        assert rung_of(told) in wanted.rungs, seen
        return
    assert wanted.may_fail, seen
    assert 500 <= call.error_status < 600, seen
    assert call.is_done, seen
    assert lab.text(phase).startswith(call.text.rstrip("\N{REPLACEMENT CHARACTER}")), seen
    if not call.pieces:
        assert call.wall_s <= FIRST_TOKEN_S + SLACK_S, seen


@pytest.mark.parametrize("fault", FAULT_PARAMS)
def test_blocks_are_idle_and_accounted_for_afterwards(lab: Lab, fault: Fault) -> None:
    result = result_of(lab, fault)
    assert not result.problem
    assert not result.hung
    assert result.idle_s is not None
    assert result.idle_s <= IDLE_S
    assert all(call.is_served or fault.pairs < TWO for call in result.others), result.others


@pytest.mark.parametrize("fault", FAULT_PARAMS)
def test_every_rung_that_served_was_counted(lab: Lab, fault: Fault) -> None:
    result = result_of(lab, fault)
    served = Counter(rung_of(result.timelines[phase]) for phase, call in result.calls.items() if call.is_served)
    del served["none"]
    assert {
        rung: result.rungs.get(rung, 0) for rung, count in served.items() if result.rungs.get(rung, 0) < count
    } == {}


@pytest.mark.parametrize("fault", FAULT_PARAMS)
def test_a_request_during_the_fault_and_one_after_it(lab: Lab, fault: Fault) -> None:
    result = result_of(lab, fault)
    after, during = result.calls[AFTER], result.calls[DURING]
    assert after.is_served, after
    assert after.text == lab.text(AFTER)
    assert rung_of(result.timelines[AFTER]) == "none", result.timelines[AFTER]["attempts"]
    if during.is_served:
        assert during.text == lab.text(DURING)
        return
    assert fault.pairs < TWO, during
    assert 500 <= during.error_status < 600, during


def test_the_quick_cells_have_every_worker_fault_and_phase() -> None:
    assert {f.side for f in QUICK} == {"P", "D"}
    assert {f.kind for f in QUICK} == {f.kind for f, _ in CELLS}
    assert {p for f, p in CELLS if f in QUICK} == set(PHASES)
    assert {rung for f, p in CELLS if f in QUICK for rung in expected(f, p).rungs} >= {"retry", "retarget", "migrate"}


def test_the_page_has_a_row_for_every_fault() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| P ", "| D "))]
    assert len(rows) == len(FAULT_PARAMS)
    assert "not run" not in page
